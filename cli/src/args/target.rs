//! Objects as kubectl users name them: `pod/web`, `po web`, `resourceclaims/gpu`.

use std::fmt;

/// A kind of object that is explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A ResourceClaim.
    Claim,
    /// A pod, with all its claims.
    Pod,
}

/// An object by kind and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its kind.
    pub(crate) kind: Kind,
    /// Its name.
    pub(crate) name: String,
}

impl Kind {
    /// By any name that kubectl has for it; `claim` is ours.
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "pod" | "pods" | "po" => Some(Self::Pod),
            "claim"
            | "claims"
            | "resourceclaim"
            | "resourceclaims"
            | "resourceclaim.resource.k8s.io"
            | "resourceclaims.resource.k8s.io" => Some(Self::Claim),
            _ => None,
        }
    }
}

impl Target {
    /// Reads one word, `KIND/NAME`, or two, `KIND NAME`.
    ///
    /// # Errors
    /// How the object is to be named.
    pub(crate) fn parse(words: &[String]) -> Result<Self, String> {
        let (kind, name) = match words {
            [one] => match one.split_once('/') {
                Some(parts) => parts,
                None if Kind::parse(one).is_some() => {
                    return Err(format!("which {one}? Name it: {one}/NAME"));
                }
                None => return Err(format!("is {one} a pod or a claim? Say pod/{one} or claim/{one}")),
            },
            [kind, name] if !kind.contains('/') && !name.contains('/') => (kind.as_str(), name.as_str()),
            _ => {
                let all = words.join(" ");
                return Err(format!("{all:?}: one object is explained at a time: pod/NAME or claim/NAME"));
            }
        };
        let Some(kind) = Kind::parse(kind) else {
            return Err(format!(
                "{kind:?} is no kind that is explained: pods (pod/NAME) and ResourceClaims (claim/NAME) are"
            ));
        };
        if name.is_empty() {
            return Err(format!("which {kind}? Name it: {kind}/NAME"));
        }
        Ok(Self { kind, name: name.to_owned() })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Claim => "claim",
            Self::Pod => "pod",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn read(text: &str) -> Result<Target, String> {
        Target::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[rstest]
    #[case("pod/web", Kind::Pod)]
    #[case("pods/web", Kind::Pod)]
    #[case("po/web", Kind::Pod)]
    #[case("Pod web", Kind::Pod)]
    #[case("po web", Kind::Pod)]
    #[case("claim/web", Kind::Claim)]
    #[case("claim web", Kind::Claim)]
    #[case("resourceclaim/web", Kind::Claim)]
    #[case("resourceclaims web", Kind::Claim)]
    #[case("resourceclaims.resource.k8s.io/web", Kind::Claim)]
    fn objects_are_named_as_kubectl_names_them(#[case] text: &str, #[case] kind: Kind) {
        assert_eq!(read(text), Ok(Target { kind, name: "web".to_owned() }));
    }

    #[rstest]
    #[case("web", "is web a pod or a claim? Say pod/web or claim/web")]
    #[case("pods", "which pods? Name it: pods/NAME")]
    #[case("pod/", "which pod? Name it: pod/NAME")]
    #[case("deploy/web", "\"deploy\" is no kind that is explained")]
    #[case("pod/a pod/b", "one object is explained at a time")]
    fn who_names_it_otherwise_is_told_how(#[case] text: &str, #[case] told: &str) {
        let why = read(text).expect_err("no object");
        assert!(why.contains(told), "{why}");
    }
}
