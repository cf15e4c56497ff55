//! Checks names and UIDs of objects before they become parts of paths: they come over a socket, and tenants write some.

/// The longest name of a namespace or request, in bytes.
const MOST_OF_LABEL: usize = 63;
/// The longest name of a claim, in bytes.
const MOST_OF_NAME: usize = 253;

/// Returns true if a UID is safe as part of a file name. Kubernetes makes UUIDs, but the text comes over a
/// socket and ends in paths.
pub(crate) fn is_safe_uid(uid: &str) -> bool {
    !uid.is_empty() && uid.len() <= 64 && uid.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Returns true if Kubernetes could have given a request, or a claim in a pod, this name.
pub(crate) fn is_label(text: &str) -> bool {
    text.len() <= MOST_OF_LABEL && is_part(text)
}

/// Returns true if Kubernetes could have given a claim this name.
pub(crate) fn is_claim_name(text: &str) -> bool {
    text.len() <= MOST_OF_NAME && text.split('.').all(is_part)
}

/// Returns true for lower-case letters, digits and hyphens, with no hyphen first or last.
fn is_part(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("8d5f5f9e-0b6c-4e0d-8a44-6c1d0d4f3f7e", true)]
    #[case("../../etc", false)]
    #[case("", false)]
    #[case("a/b", false)]
    fn uids_that_could_leave_a_directory_are_unsafe(#[case] uid: &str, #[case] safe: bool) {
        assert_eq!(is_safe_uid(uid), safe);
    }
}
