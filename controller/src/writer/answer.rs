//! Interprets answers of the API server: a request was carried out, was not, or may have been.

use super::eviction;

/// The reason why it is unknown whether a request was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Doubt {
    /// There was no answer within the time limit.
    Late,
    /// The connection broke.
    Lost,
    /// The server reported an error without saying at which step it happened.
    Failed,
}

impl Doubt {
    /// Returns the one-word name that metrics use.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Late => "no_answer",
            Self::Lost => "connection_lost",
            Self::Failed => "server_error",
        }
    }
}

/// What to do about an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing was done. Read the object and try again.
    Again(String),
    /// The request may have been carried out, or may be later. Read the object and try again.
    Unsure(Doubt, String),
    /// There is no such object.
    NotFound,
    /// Nothing was done, and nothing will be.
    Never(String),
}

/// Texts of a status 500 for requests that never reached the store or were refused by it. The admission chain
/// runs before the store (`failed calling webhook`), and the store takes all of a write or nothing (etcd's
/// errors).
const NOT_DONE: [&str; 2] =
    ["Internal error occurred: failed calling webhook", "etcdserver: mvcc: database space exceeded"];
/// The same for requests that are too large and stay so (etcd's limit, and the limit of the connection to
/// etcd).
const TOO_LARGE: [&str; 2] = ["etcdserver: request is too large", "trying to send message larger than max"];

pub(super) fn judge(error: &kube::Error) -> Verdict {
    let kube::Error::Api(status) = error else { return Verdict::Unsure(Doubt::Lost, error.to_string()) };
    let message = status.message.clone();
    match status.code {
        404 => Verdict::NotFound,
        // A disruption budget does not change within the time that the writer waits.
        429 if eviction::is_budget(status) => Verdict::Never(message),
        // Conflicts and overload pass.
        409 | 429 => Verdict::Again(message),
        500 if TOO_LARGE.iter().any(|said| message.contains(said)) => Verdict::Never(message),
        500 if NOT_DONE.iter().any(|said| message.contains(said)) => Verdict::Again(message),
        408 | 500..=599 => Verdict::Unsure(Doubt::Failed, message),
        _ => Verdict::Never(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use rstest::rstest;

    #[rstest]
    #[case::gone(404, "not found", Verdict::NotFound)]
    #[case::conflict(409, "modified", Verdict::Again("modified".to_owned()))]
    #[case::overload(429, "slow down", Verdict::Again("slow down".to_owned()))]
    #[case::denied(403, "denied by policy", Verdict::Never("denied by policy".to_owned()))]
    #[case::invalid(422, "is invalid", Verdict::Never("is invalid".to_owned()))]
    #[case::body_too_large(413, "limit is 3145728", Verdict::Never("limit is 3145728".to_owned()))]
    #[case::object_too_large(500, "etcdserver: request is too large",
        Verdict::Never("etcdserver: request is too large".to_owned()))]
    #[case::webhook_away(500, "Internal error occurred: failed calling webhook \"x\": refused",
        Verdict::Again("Internal error occurred: failed calling webhook \"x\": refused".to_owned()))]
    #[case::other_failure(500, "etcdserver: request timed out",
        Verdict::Unsure(Doubt::Failed, "etcdserver: request timed out".to_owned()))]
    #[case::time_out(504, "Timeout", Verdict::Unsure(Doubt::Failed, "Timeout".to_owned()))]
    #[case::leader_change(503, "leader changed", Verdict::Unsure(Doubt::Failed, "leader changed".to_owned()))]
    fn an_answer_is_taken_for_what_it_says(
        #[case] code: u16,
        #[case] message: &str,
        #[case] verdict: Verdict,
    ) {
        let status = Status { code, message: message.to_owned(), ..Status::default() };
        assert_eq!(judge(&kube::Error::Api(Box::new(status))), verdict);
    }
}
