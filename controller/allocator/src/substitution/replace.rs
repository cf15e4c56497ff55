//! Changes an expression for one profile into one for another.

use crate::selector::Selector;

/// Returns the expression with another profile instead of the one that it demands; `None` if this cannot be
/// done with certainty: the expression demands no profile or several, or names the profile in two places.
pub(super) fn replace(expression: &str, driver: &str, other: &str) -> Option<String> {
    let (asked, quoted) = demanded(expression, driver)?;
    let quote = quoted.chars().next()?;
    // A name that would end the literal, or have a meaning in it, is not the name of a profile.
    if other.contains(['"', '\'', '\\']) || asked == other {
        return None;
    }
    let replaced = expression.replacen(&quoted, &format!("{quote}{other}{quote}"), 1);
    let compiled = Selector::compile(&replaced);
    (compiled.demanded(driver, "profile")? == [other]).then_some(replaced)
}

/// Returns the only profile that the expression demands, if it names it in one place.
pub(super) fn profile(expression: &str, driver: &str) -> Option<String> {
    demanded(expression, driver).map(|(asked, _)| asked)
}

fn demanded(expression: &str, driver: &str) -> Option<(String, String)> {
    let selector = Selector::compile(expression);
    let asked = match selector.demanded(driver, "profile")?.as_slice() {
        [one] => (*one).to_owned(),
        _ => return None,
    };
    // The name must be there exactly once, in either form. If it is in a comment, in a second literal or in
    // an escape sequence, it is found twice or not at all.
    let forms = [format!("\"{asked}\""), format!("'{asked}'")];
    let found: usize = forms.iter().map(|form| expression.matches(form.as_str()).count()).sum();
    let quoted = forms.into_iter().find(|form| expression.contains(form.as_str()))?;
    (found == 1 && !expression.contains("//")).then_some((asked, quoted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const DRIVER: &str = "gpu.aliquot.dev";

    #[rstest]
    #[case::plain(
        r#"device.attributes["gpu.aliquot.dev"].profile == "1g.10gb""#,
        Some(r#"device.attributes["gpu.aliquot.dev"].profile == "2g.20gb""#)
    )]
    #[case::single_quotes(
        "device.attributes['gpu.aliquot.dev'].profile == '1g.10gb'",
        Some("device.attributes['gpu.aliquot.dev'].profile == '2g.20gb'")
    )]
    #[case::the_other_way_round(
        r#""1g.10gb" == device.attributes["gpu.aliquot.dev"].profile"#,
        Some(r#""2g.20gb" == device.attributes["gpu.aliquot.dev"].profile"#)
    )]
    #[case::with_more(
        r#"device.driver == "gpu.aliquot.dev" && (device.attributes["gpu.aliquot.dev"].profile == "1g.10gb" && device.attributes["gpu.aliquot.dev"].productName.contains("H100"))"#,
        Some(r#"device.driver == "gpu.aliquot.dev" && (device.attributes["gpu.aliquot.dev"].profile == "2g.20gb" && device.attributes["gpu.aliquot.dev"].productName.contains("H100"))"#)
    )]
    #[case::a_longer_name_beside_it(
        r#"device.attributes["gpu.aliquot.dev"].profile == "1g.10gb" && "1g.10gb+me" != """#,
        Some(r#"device.attributes["gpu.aliquot.dev"].profile == "2g.20gb" && "1g.10gb+me" != """#)
    )]
    #[case::bound(
        r#"cel.bind(d, device.attributes["gpu.aliquot.dev"], d.profile == "1g.10gb")"#,
        Some(r#"cel.bind(d, device.attributes["gpu.aliquot.dev"], d.profile == "2g.20gb")"#)
    )]
    #[case::either(r#"device.attributes["gpu.aliquot.dev"].profile in ["1g.10gb", "2g.20gb"]"#, None)]
    #[case::twice(r#"device.attributes["gpu.aliquot.dev"].profile == "1g.10gb" && "1g.10gb" != "x""#, None)]
    #[case::negated(r#"!(device.attributes["gpu.aliquot.dev"].profile == "1g.10gb")"#, None)]
    #[case::other_driver(r#"device.attributes["gpu.nvidia.com"].profile == "1g.10gb""#, None)]
    #[case::comment("device.attributes['gpu.aliquot.dev'].profile == '1g.10gb' // small", None)]
    #[case::none("true", None)]
    #[case::broken("device.attributes[", None)]
    fn only_what_is_understood_is_replaced(#[case] expression: &str, #[case] want: Option<&str>) {
        assert_eq!(replace(expression, DRIVER, "2g.20gb").as_deref(), want);
    }

    #[test]
    fn what_could_end_the_literal_is_refused() {
        let expression = r#"device.attributes["gpu.aliquot.dev"].profile == "1g.10gb""#;
        assert_eq!(replace(expression, DRIVER, r#"x" || "a" == "a"#), None);
    }
}
