//! The objects in memory, with the history that watches resume from.
//!
//! One counter numbers all writes, as etcd's revision does. Each table keeps its last changes;
//! whoever wants to go on from before them is told that the history has expired.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;

use crate::audit::{Audit, AuditEntry, ChangeKind, Origin};
use crate::value::set;

/// Namespace (empty for cluster-scoped kinds) and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) revision: u64,
    pub(crate) object: Arc<Value>,
}

/// One write, as watches see it.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) revision: u64,
    pub(crate) key: Key,
    pub(crate) kind: ChangeKind,
    /// The object after the write, or the last state of a deleted one.
    pub(crate) object: Arc<Value>,
    pub(crate) previous: Option<Arc<Value>>,
}

struct Table {
    objects: BTreeMap<Key, Stored>,
    log: VecDeque<Change>,
    /// Changes up to this revision may be missing from the log.
    trimmed: u64,
    changed: watch::Sender<u64>,
}

impl Table {
    fn new(trimmed: u64) -> Self {
        Self { objects: BTreeMap::new(), log: VecDeque::new(), trimmed, changed: watch::Sender::new(0) }
    }
}

struct Inner {
    revision: u64,
    tables: HashMap<String, Table>,
    audit: Audit,
}

/// The objects of all kinds.
pub(crate) struct Store {
    inner: Mutex<Inner>,
    any: watch::Sender<u64>,
    history: usize,
}

/// A write that did not find what it expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// There is an object of that name already.
    Exists,
    /// The object is gone.
    Gone,
    /// The object is of another revision.
    Modified,
}

/// Everything in a table at one revision.
pub(crate) struct Snapshot {
    pub(crate) revision: u64,
    pub(crate) items: Vec<(Key, Stored)>,
}

/// The history asked for is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expired {
    pub(crate) oldest: u64,
}

/// What to write.
pub(crate) struct Write {
    pub(crate) key: Key,
    /// The revision that must be there now; `None` when the object must not exist.
    pub(crate) expected: Option<u64>,
    /// `None` deletes.
    pub(crate) object: Option<Value>,
}

impl Store {
    pub(crate) fn new(history: usize, audit: usize) -> Self {
        Self {
            inner: Mutex::new(Inner { revision: 1, tables: HashMap::new(), audit: Audit::new(audit) }),
            any: watch::Sender::new(0),
            history: history.max(1),
        }
    }

    pub(crate) fn revision(&self) -> u64 {
        self.inner.lock().revision
    }

    pub(crate) fn get(&self, table: &str, key: &Key) -> Option<Stored> {
        self.inner.lock().tables.get(table)?.objects.get(key).cloned()
    }

    /// All objects now; of one namespace unless it is empty.
    pub(crate) fn list(&self, table: &str, namespace: &str) -> Snapshot {
        let inner = self.inner.lock();
        let items = inner.tables.get(table).map_or_else(Vec::new, |t| {
            within(&t.objects, namespace).map(|(k, s)| (k.clone(), s.clone())).collect()
        });
        Snapshot { revision: inner.revision, items }
    }

    /// The keys of the objects that pass a test, which must not look into the store itself.
    pub(crate) fn keys_where(&self, table: &str, namespace: &str, test: impl Fn(&Value) -> bool) -> Vec<Key> {
        let inner = self.inner.lock();
        inner.tables.get(table).map_or_else(Vec::new, |t| {
            within(&t.objects, namespace).filter(|(_, s)| test(&s.object)).map(|(k, _)| k.clone()).collect()
        })
    }

    /// All objects as they were at `revision`, by undoing what was logged since.
    pub(crate) fn list_at(&self, table: &str, namespace: &str, revision: u64) -> Result<Snapshot, Expired> {
        let inner = self.inner.lock();
        let Some(t) = inner.tables.get(table) else { return Ok(Snapshot { revision, items: Vec::new() }) };
        if revision < t.trimmed {
            return Err(Expired { oldest: t.trimmed });
        }
        let mut objects = t.objects.clone();
        for change in t.log.iter().rev().take_while(|c| c.revision > revision) {
            match &change.previous {
                Some(previous) => {
                    let revision = revision_of(previous);
                    let stored = Stored { revision, object: Arc::clone(previous) };
                    objects.insert(change.key.clone(), stored);
                }
                None => {
                    objects.remove(&change.key);
                }
            }
        }
        let items =
            objects.into_iter().filter(|(k, _)| namespace.is_empty() || k.namespace == namespace).collect();
        Ok(Snapshot { revision, items })
    }

    /// Up to `max` changes after `revision`, and the revision up to which they are complete.
    pub(crate) fn changes_since(
        &self,
        table: &str,
        revision: u64,
        max: usize,
    ) -> Result<(Vec<Change>, u64), Expired> {
        let inner = self.inner.lock();
        let Some(t) = inner.tables.get(table) else { return Ok((Vec::new(), inner.revision)) };
        if revision < t.trimmed {
            return Err(Expired { oldest: t.trimmed });
        }
        let start = t.log.partition_point(|c| c.revision <= revision);
        let changes: Vec<Change> = t.log.iter().skip(start).take(max).cloned().collect();
        let complete = match changes.last() {
            Some(last) if changes.len() == max => last.revision,
            _ => inner.revision,
        };
        Ok((changes, complete))
    }

    /// Is told about every change of a table.
    pub(crate) fn subscribe(&self, table: &str) -> watch::Receiver<u64> {
        let mut inner = self.inner.lock();
        inner.tables.entry(table.to_owned()).or_insert_with(|| Table::new(0)).changed.subscribe()
    }

    /// Is told about every change of whatever table.
    pub(crate) fn subscribe_all(&self) -> watch::Receiver<u64> {
        self.any.subscribe()
    }

    /// Writes if what is there is what the writer has seen.
    pub(crate) fn write(&self, table: &str, write: Write, origin: &Origin) -> Result<Stored, Mismatch> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let t = inner.tables.entry(table.to_owned()).or_insert_with(|| Table::new(0));
        let current = t.objects.get(&write.key).cloned();
        match (&current, write.expected) {
            (None, None) => {}
            (Some(_), None) => return Err(Mismatch::Exists),
            (None, Some(_)) => return Err(Mismatch::Gone),
            (Some(now), Some(expected)) if now.revision != expected => return Err(Mismatch::Modified),
            (Some(_), Some(_)) => {}
        }
        inner.revision += 1;
        let revision = inner.revision;
        let previous = current.map(|s| s.object);
        let kind = match (&previous, &write.object) {
            (None, _) => ChangeKind::Added,
            (Some(_), Some(_)) => ChangeKind::Modified,
            (Some(_), None) => ChangeKind::Deleted,
        };
        let deleted = write.object.is_none();
        // The last state of a deleted object is shown with the revision of the deletion.
        let mut object = match (write.object, &previous) {
            (Some(new), _) => new,
            (None, Some(old)) => Value::clone(old),
            (None, None) => return Err(Mismatch::Gone),
        };
        set(&mut object, &["metadata", "resourceVersion"], revision.to_string());
        let object = Arc::new(object);
        let stored = Stored { revision, object: Arc::clone(&object) };
        if deleted {
            t.objects.remove(&write.key);
        } else {
            t.objects.insert(write.key.clone(), stored.clone());
        }
        inner.audit.push(AuditEntry {
            revision,
            time: jiff::Timestamp::now(),
            origin: origin.clone(),
            change: kind,
            namespace: write.key.namespace.clone(),
            name: write.key.name.clone(),
            before: previous.clone(),
            after: (!deleted).then(|| Arc::clone(&object)),
        });
        t.log.push_back(Change { revision, key: write.key, kind, object, previous });
        while t.log.len() > self.history {
            if let Some(old) = t.log.pop_front() {
                t.trimmed = old.revision;
            }
        }
        t.changed.send_replace(revision);
        self.any.send_replace(revision);
        Ok(stored)
    }

    /// Forgets the history of all tables, so that every older watch has to list again.
    pub(crate) fn compact(&self) {
        let mut inner = self.inner.lock();
        let revision = inner.revision;
        for table in inner.tables.values_mut() {
            table.log.clear();
            table.trimmed = revision;
            // Watches that wait are to notice.
            table.changed.send_replace(revision);
        }
    }

    pub(crate) fn audit<T>(&self, read: impl FnOnce(&Audit) -> T) -> T {
        read(&self.inner.lock().audit)
    }
}

/// The objects of one namespace; of all when it is empty.
fn within<'a>(
    objects: &'a BTreeMap<Key, Stored>,
    namespace: &'a str,
) -> impl Iterator<Item = (&'a Key, &'a Stored)> {
    objects
        .range(Key::new(namespace, "")..)
        .take_while(move |(k, _)| namespace.is_empty() || k.namespace == namespace)
}

/// The revision in an object's metadata; 0 when it has none.
pub(crate) fn revision_of(object: &Value) -> u64 {
    crate::value::text(object, &["metadata", "resourceVersion"]).parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn write(name: &str, expected: Option<u64>, object: Option<Value>) -> Write {
        Write { key: Key::new("", name), expected, object }
    }

    fn origin() -> Origin {
        Origin::internal("test", "things")
    }

    #[test]
    fn a_write_that_saw_an_older_revision_is_refused() {
        let store = Store::new(10, 100);
        let a = store.write("things", write("a", None, Some(json!({"metadata": {}}))), &origin()).unwrap();
        let w = write("a", Some(a.revision), Some(json!({"metadata": {}, "x": 1})));
        store.write("things", w, &origin()).unwrap();
        let w = write("a", Some(a.revision), Some(json!({"metadata": {}, "x": 2})));
        assert_eq!(store.write("things", w, &origin()).unwrap_err(), Mismatch::Modified);
        let w = write("a", None, Some(json!({})));
        assert_eq!(store.write("things", w, &origin()).unwrap_err(), Mismatch::Exists);
        let w = write("b", Some(1), None);
        assert_eq!(store.write("things", w, &origin()).unwrap_err(), Mismatch::Gone);
    }

    #[test]
    fn a_list_of_the_past_undoes_later_writes() {
        let store = Store::new(10, 100);
        let a = store.write("things", write("a", None, Some(json!({"v": 1}))), &origin()).unwrap();
        store.write("things", write("b", None, Some(json!({"v": 1}))), &origin()).unwrap();
        store.write("things", write("a", Some(a.revision), None), &origin()).unwrap();
        let past = store.list_at("things", "", a.revision).unwrap();
        let names: Vec<_> = past.items.iter().map(|(k, _)| k.name.as_str()).collect();
        assert_eq!(names, ["a"]);
        assert_eq!(past.items[0].1.revision, a.revision);
    }

    #[test]
    fn history_beyond_the_window_has_expired() {
        let store = Store::new(2, 100);
        let first = store.write("things", write("a", None, Some(json!({}))), &origin()).unwrap().revision;
        for name in ["b", "c", "d"] {
            store.write("things", write(name, None, Some(json!({}))), &origin()).unwrap();
        }
        assert!(store.changes_since("things", first, 100).is_err());
        let (changes, complete) = store.changes_since("things", first + 1, 100).unwrap();
        assert_eq!(changes.len(), 2);
        assert_eq!(complete, store.revision());
        store.compact();
        assert!(store.changes_since("things", first + 1, 100).is_err());
        assert!(store.changes_since("things", store.revision(), 100).unwrap().0.is_empty());
    }
}
