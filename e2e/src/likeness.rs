//! Whether a command printed what a document shows, up to what is another each time.

/// Letters and digits of the suffixes that Kubernetes generates: no vowels, so that no words come about.
const GENERATED: &str = "bcdfghjklmnpqrstvwxz2456789";
/// What a document shows where it leaves something out.
pub const LEFT_OUT: char = '…';

/// Lines that a document shows and a command did not print. Further lines may have been printed, in any
/// order.
///
/// Ages, times, devices that may be others and generated names are alike. `…` in a line stands for all the
/// rest of it, and alone for lines.
pub fn missing<'a>(shown: &'a [String], printed: &[String]) -> Vec<&'a str> {
    let mut printed: Vec<Vec<String>> = printed.iter().map(|line| words(line)).collect();
    let mut missing = Vec::new();
    for line in shown {
        if line.trim().is_empty() || line.trim().starts_with(LEFT_OUT) {
            continue;
        }
        let found = match line.split_once(LEFT_OUT) {
            Some((before, _)) => {
                // The last word is not whole.
                let whole = before.rfind(char::is_whitespace).map_or("", |end| before.split_at(end).0);
                let wanted = words(whole);
                printed.iter().position(|line| line.starts_with(&wanted))
            }
            None => {
                let wanted = words(line);
                printed.iter().position(|line| *line == wanted)
            }
        };
        match found {
            // Each line stands for one.
            Some(at) => drop(printed.swap_remove(at)),
            None => missing.push(line.as_str()),
        }
    }
    missing
}

/// Whether the text of a document is a refusal, so that the command has to fail.
pub fn is_refusal(shown: &[String]) -> bool {
    let first = shown.first().map(String::as_str).unwrap_or_default();
    first.starts_with("Error") || first.contains("is invalid:") || first.contains("denied the request")
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(|word| if changes(word) { "#".to_owned() } else { word.to_owned() }).collect()
}

/// Whether a word is another each time.
fn changes(word: &str) -> bool {
    let word = word.trim_matches(|c: char| c.is_ascii_punctuation());
    let digit = |c: char| c.is_ascii_digit();
    let age = word.starts_with(digit) && word.ends_with(['s', 'm', 'h', 'd']) && word.len() <= 6;
    let time = word.contains('T') && word.contains(':');
    let fraction = word.contains('.') && word.parse::<f64>().is_ok();
    // By its name or its address.
    let device = word.strip_prefix("gpu-").is_some_and(|rest| rest.starts_with(digit));
    let address = word.starts_with("0000:");
    age || time
        || fraction
        || device
        || address
        || word.split(|c: char| !c.is_ascii_alphanumeric()).any(is_generated)
}

/// Whether a part of a word is a suffix that Kubernetes generated, or of a UUID or another long number.
fn is_generated(part: &str) -> bool {
    let generated = part.len() >= 5 && part.chars().all(|c| GENERATED.contains(c));
    let number = part.len() >= 6 && part.chars().all(|c| c.is_ascii_hexdigit());
    let (letters, digits) = (part.contains(char::is_alphabetic), part.contains(|c: char| c.is_ascii_digit()));
    generated && letters || number && digits
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[rstest]
    #[case::a_uuid(
        "GPU 0: (UUID: GPU-81a74e1a-3404-5dca-8f8b-7322e5e91fb0)",
        "GPU 0: (UUID: GPU-00000000-3404-5dca-8f8b-7322e5e91fb0)"
    )]
    #[case::a_device("share gpu-2-share 10Gi", "share gpu-0-share 10Gi")]
    #[case::a_time("until 2026-11-28T15:04:47Z", "until 2026-11-29T15:04:48Z")]
    #[case::an_age("trainer   1/1   Running   4s", "trainer  1/1  Running  2m")]
    #[case::a_generated_name("claim web-kbvjx is gone", "claim web-zzzzz is gone")]
    #[case::a_generated_name_at_the_end_of_a_sentence("evicts web-kbvjx.", "evicts web-bbbbb.")]
    #[case::more_lines("a", "b\na")]
    #[case::another_order("a\n\nb", "b\na")]
    #[case::the_rest_of_a_line("web-… two pods", "web-x four")]
    #[case::a_half_word("it says: {\"uuid\":\"GPU-…", "it says: more")]
    #[case::lines_left_out("a\n…", "a")]
    fn like_what_is_shown(#[case] shown: &str, #[case] printed: &str) {
        assert_eq!(missing(&lines(shown), &lines(printed)), Vec::<&str>::new());
    }

    #[rstest]
    #[case::another_state("trainer   1/1   Running   4s", "trainer  1/1  Pending  4s")]
    #[case::another_number("10240 MiB", "20480 MiB")]
    #[case::less_of_as_many("trainer   1/1   Running   4s", "trainer  0/1  Running  4s")]
    #[case::another_profile("gpu/1g5gb", "gpu/1g10gb")]
    #[case::less("a\nb", "a")]
    #[case::one_of_two_like_lines("web-kbvjx\nweb-zzzzz", "web-bbbbb")]
    #[case::another_name("pod/first-share created", "pod/first-other created")]
    #[case::another_beginning("evicted so that …", "evicted because")]
    fn unlike_what_is_shown(#[case] shown: &str, #[case] printed: &str) {
        assert_eq!(missing(&lines(shown), &lines(printed)).len(), 1);
    }

    #[rstest]
    #[case("Error from server (NotFound): no", true)]
    #[case("The request is invalid: why", true)]
    #[case("The resourceclaims \"a\" is invalid: why", true)]
    #[case("pod/a created", false)]
    #[case("", false)]
    fn refusals_are_known_by_their_first_line(#[case] shown: &str, #[case] refusal: bool) {
        assert_eq!(is_refusal(&lines(shown)), refusal);
    }
}
