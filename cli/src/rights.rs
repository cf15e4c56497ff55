//! Rights that a command would need and that its user has not.

use std::fmt;

/// A right that is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Right {
    /// The verb, such as `list`.
    pub(crate) verb: &'static str,
    /// The resource with its group, such as `nodes` or `resourceclaims.resource.k8s.io`.
    pub(crate) resource: String,
    /// Its namespace; `None` is the whole cluster.
    pub(crate) namespace: Option<String>,
    /// What the API server said.
    pub(crate) refusal: String,
}

impl Right {
    /// The right that an answer is about, if that is what is wrong. The outermost words of the error are the resource.
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

    /// The command that asks whether one has it.
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
