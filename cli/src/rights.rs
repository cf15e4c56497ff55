//! Rights that a command needs and its user does not have.

use std::fmt;

/// A missing right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Right {
    /// The verb, such as `list`.
    pub(crate) verb: &'static str,
    /// The resource with its group, such as `nodes` or `resourceclaims.resource.k8s.io`.
    pub(crate) resource: String,
    /// The namespace; `None` means the whole cluster.
    pub(crate) namespace: Option<String>,
    /// The message of the API server.
    pub(crate) refusal: String,
}

impl Right {
    /// Returns the right that is missing, if that is the error; otherwise `None`. The outermost text of the
    /// error must be the resource.
    pub(crate) fn refused(
        verb: &'static str,
        error: &anyhow::Error,
        namespace: Option<&str>,
    ) -> Option<Self> {
        error.chain().find_map(|cause| match cause.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) if status.code == 403 => Some(Self {
                verb,
                resource: error.to_string(),
                namespace: namespace.map(str::to_owned),
                refusal: status.message.clone(),
            }),
            _ => None,
        })
    }

    /// Returns the command that shows whether the user has the right.
    pub(crate) fn question(&self) -> String {
        let scope = self.namespace.as_ref().map_or_else(|| "-A".to_owned(), |name| format!("-n {name}"));
        format!("kubectl auth can-i {} {} {scope}", self.verb, self.resource)
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, resource, .. } = self;
        match &self.namespace {
            Some(namespace) => write!(f, "{verb} {resource} in namespace {namespace}"),
            None => write!(f, "{verb} {resource} of the whole cluster"),
        }
    }
}
