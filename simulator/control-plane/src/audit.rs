//! The record of all writes, for auditors that trust nobody else.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::{Value, json};

/// What a write did to its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The object was made.
    Added,
    /// The object was changed.
    Modified,
    /// The object was removed.
    Deleted,
}

impl ChangeKind {
    /// The type of the watch event.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

/// Who wrote, and through which request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origin {
    /// The user: the bearer token of the kubeconfig, or the name of a built-in controller.
    pub user: String,
    /// The `User-Agent` header.
    pub user_agent: String,
    /// `create`, `update`, `patch`, `apply`, `delete`.
    pub verb: String,
    /// API group; empty for the core group.
    pub group: String,
    /// Plural name of the resource.
    pub resource: String,
    /// `status`, `binding`, …; empty for the object itself.
    pub subresource: String,
}

impl Origin {
    #[cfg(test)]
    pub(crate) fn internal(user: &str, resource: &str) -> Self {
        Self { user: user.to_owned(), resource: resource.to_owned(), ..Self::default() }
    }
}

/// One write that took effect.
#[derive(Debug, Clone)]
pub struct AuditEntry {
    /// The resource version that the write made.
    pub revision: u64,
    /// When it took effect.
    pub time: jiff::Timestamp,
    /// Who wrote, and how.
    pub origin: Origin,
    /// What it did.
    pub change: ChangeKind,
    /// The object's namespace; empty for cluster-scoped kinds.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// The object before the write.
    pub before: Option<Arc<Value>>,
    /// The object after the write.
    pub after: Option<Arc<Value>>,
}

impl AuditEntry {
    /// As `/_audit` shows it.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "revision": self.revision,
            "time": self.time.to_string(),
            "user": self.origin.user,
            "userAgent": self.origin.user_agent,
            "verb": self.origin.verb,
            "group": self.origin.group,
            "resource": self.origin.resource,
            "subresource": self.origin.subresource,
            "change": self.change.as_str(),
            "namespace": self.namespace,
            "name": self.name,
            "before": self.before.as_deref(),
            "after": self.after.as_deref(),
        })
    }
}

pub(crate) struct Audit {
    entries: VecDeque<AuditEntry>,
    limit: usize,
    /// Entries up to this revision may be missing.
    trimmed: u64,
}

impl Audit {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { entries: VecDeque::new(), limit, trimmed: 0 }
    }

    pub(crate) fn push(&mut self, entry: AuditEntry) {
        self.entries.push_back(entry);
        while self.entries.len() > self.limit {
            if let Some(old) = self.entries.pop_front() {
                self.trimmed = old.revision;
            }
        }
    }

    /// The entries after a revision, oldest first.
    pub(crate) fn since(&self, revision: u64) -> Vec<AuditEntry> {
        let start = self.entries.partition_point(|e| e.revision <= revision);
        self.entries.iter().skip(start).cloned().collect()
    }

    /// Whether nothing after a revision has been dropped.
    pub(crate) const fn is_complete_since(&self, revision: u64) -> bool {
        self.trimmed <= revision
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_entries_go_first() {
        let mut audit = Audit::new(2);
        for revision in 1..=3 {
            audit.push(AuditEntry {
                revision,
                time: jiff::Timestamp::UNIX_EPOCH,
                origin: Origin::default(),
                change: ChangeKind::Added,
                namespace: String::new(),
                name: String::new(),
                before: None,
                after: None,
            });
        }
        assert_eq!(audit.since(0).iter().map(|e| e.revision).collect::<Vec<_>>(), [2, 3]);
        assert!(!audit.is_complete_since(0) && audit.is_complete_since(1));
    }
}
