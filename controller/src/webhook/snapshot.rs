//! Slices and classes as reviews see them: a copy that does not change.
//!
//! One task, for which nobody waits, takes in changes beside the copy, and the next copy replaces this one at
//! once. A review looks at the copy that was there when it began, however long it takes; the lock around the
//! copy is held only to clone a pointer.

use crate::reconciler::{Input, Part, Seen};
use aliquot_allocator::snapshot::Snapshot;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use parking_lot::RwLock;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The most changes by which a copy lags behind while further changes come.
const MOST_CHANGES: usize = 1024;
/// The pause after each copy, as a multiple of the time that the copy took, and its maximum: where copies are
/// large, few are made.
const PAUSE: u32 = 4;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The interval at which completeness is checked.
const LISTED: Duration = Duration::from_millis(100);

/// The latest copy. Clones share their state.
#[derive(Clone)]
pub(super) struct SnapshotStore {
    copy: Arc<RwLock<Arc<Snapshot>>>,
    complete: Arc<AtomicBool>,
}

impl SnapshotStore {
    /// Returns the latest copy.
    pub(super) fn latest(&self) -> Arc<Snapshot> {
        self.copy.read().clone()
    }

    /// Returns true if slices and classes were listed once. Before that, no device seems to be of this
    /// driver.
    pub(super) fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    /// Waits until slices and classes were listed.
    pub(super) async fn complete(&self) {
        while !self.is_complete() {
            tokio::time::sleep(LISTED).await;
        }
    }
}

/// Takes in changes and makes the copies.
pub(super) struct SnapshotWriter {
    index: Snapshot,
    store: SnapshotStore,
    /// Slices that a list which is being taken in has not named so far.
    missing: Option<HashSet<Arc<str>>>,
    changes: usize,
    /// True if slices, and true if classes, were listed once.
    listed: (bool, bool),
}

impl SnapshotWriter {
    /// Returns a writer that knows nothing yet.
    pub(super) fn new(driver: &str) -> Self {
        let index = Snapshot::new(driver);
        let copy = Arc::new(RwLock::new(Arc::new(index.published())));
        let store = SnapshotStore { copy, complete: Arc::default() };
        Self { index, store, missing: None, changes: 0, listed: (false, false) }
    }

    /// Returns the store in which the copies are read.
    pub(super) fn store(&self) -> SnapshotStore {
        self.store.clone()
    }

    /// Takes in changes until all senders are gone.
    pub(super) async fn follow(mut self, mut inputs: mpsc::Receiver<Input>) {
        while let Some(input) = inputs.recv().await {
            self.take(input);
            if inputs.is_empty() || self.changes >= MOST_CHANGES {
                let begun = Instant::now();
                if self.publish() {
                    let pause = begun.elapsed().saturating_mul(PAUSE).min(LONGEST_PAUSE);
                    tokio::time::sleep(pause).await;
                }
            }
            // Watches go on between the steps of a list.
            tokio::task::yield_now().await;
        }
    }

    /// Takes in a change.
    pub(super) fn take(&mut self, input: Input) {
        match input {
            Input::Slice(seen) => self.slice(seen),
            Input::Slices(part) => self.slices(part),
            Input::Class(seen) => self.class(seen),
            _ => return,
        }
        self.changes += 1;
    }

    /// Makes the next copy, unless nothing changed or a list is half taken in. Returns true if a copy was
    /// made.
    pub(super) fn publish(&mut self) -> bool {
        if self.changes == 0 || self.missing.is_some() {
            return false;
        }
        self.changes = 0;
        let next = Arc::new(self.index.published());
        let last = std::mem::replace(&mut *self.store.copy.write(), next);
        // Not under the lock: this may be the last reference to a large copy.
        drop(last);
        if self.listed == (true, true) {
            self.store.complete.store(true, Ordering::Release);
        }
        true
    }

    fn slice(&mut self, seen: Seen<ResourceSlice>) {
        match seen {
            Seen::Apply(slice) => drop(self.index.apply_slice(&slice)),
            Seen::Delete(slice) => {
                drop(self.index.delete_slice(slice.metadata.name.as_deref().unwrap_or_default()));
            }
            Seen::Reset(slices) => {
                self.listed.0 = true;
                drop(self.index.reset_slices(&slices));
            }
        }
    }

    fn slices(&mut self, part: Part<ResourceSlice>) {
        match part {
            Part::Asked(_) => {}
            Part::Begin => self.missing = Some(self.index.slice_names().cloned().collect()),
            Part::Some(slices) => {
                if let Some(missing) = &mut self.missing {
                    for name in slices.iter().filter_map(|slice| slice.metadata.name.as_deref()) {
                        missing.remove(name);
                    }
                }
                drop(self.index.apply_slices(&slices));
            }
            Part::End => {
                self.listed.0 = true;
                let missing = self.missing.take().unwrap_or_default();
                drop(self.index.delete_slices(missing.iter().map(|name| &**name)));
            }
        }
    }

    fn class(&mut self, seen: Seen<DeviceClass>) {
        match seen {
            Seen::Apply(class) => drop(self.index.apply_class(&class)),
            Seen::Delete(class) => {
                drop(self.index.delete_class(class.metadata.name.as_deref().unwrap_or_default()));
            }
            Seen::Reset(classes) => {
                self.listed.1 = true;
                drop(self.index.reset_classes(&classes));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aliquot_allocator::fixtures::{self, DRIVER};
    use aliquot_model::layout::AllocatorMode;

    fn slices(node: &str, generation: i64) -> Vec<ResourceSlice> {
        fixtures::slices(node, 1, AllocatorMode::Controller, generation)
    }

    fn listed(writer: &mut SnapshotWriter, slices: Vec<ResourceSlice>) {
        for part in [Part::Begin, Part::Some(slices), Part::End] {
            writer.take(Input::Slices(part));
        }
        writer.publish();
    }

    fn nodes(index: &Snapshot) -> Vec<&str> {
        let mut nodes: Vec<&str> = index.pools().filter_map(|pool| pool.node.as_deref()).collect();
        nodes.sort_unstable();
        nodes
    }

    #[test]
    fn reviews_see_all_that_was_known_before_a_list_until_all_of_the_list_is_known() {
        let mut writer = SnapshotWriter::new(DRIVER);
        let store = writer.store();
        listed(&mut writer, [slices("n1", 1), slices("n2", 1)].concat());
        assert_eq!(nodes(&store.latest()), ["n1", "n2"]);
        // A review that goes on all the while, and a list that takes its time.
        let review = store.latest();
        writer.take(Input::Slices(Part::Begin));
        writer.take(Input::Slices(Part::Some(slices("n2", 2))));
        writer.take(Input::Class(Seen::Reset(fixtures::classes())));
        assert!(!writer.publish());
        assert_eq!(nodes(&store.latest()), ["n1", "n2"]);
        writer.take(Input::Slices(Part::Some(slices("n3", 1))));
        writer.take(Input::Slices(Part::End));
        assert!(writer.publish());
        assert_eq!(nodes(&store.latest()), ["n2", "n3"]);
        assert!(store.latest().class("gpu.aliquot.dev").is_some());
        assert_eq!(nodes(&review), ["n1", "n2"]);
    }

    #[test]
    fn it_is_complete_when_both_slices_and_classes_were_listed() {
        let mut writer = SnapshotWriter::new(DRIVER);
        let store = writer.store();
        listed(&mut writer, slices("n1", 1));
        assert!(!store.is_complete());
        writer.take(Input::Class(Seen::Reset(Vec::new())));
        assert!(!store.is_complete(), "nobody sees it yet");
        writer.publish();
        assert!(store.is_complete());
    }

    #[test]
    fn pools_that_a_list_does_not_change_are_not_built_again() {
        let mut writer = SnapshotWriter::new(DRIVER);
        let store = writer.store();
        let layout = |index: &Snapshot, node: &str| {
            let mut pools = index.pools();
            pools.find(|pool| pool.node.as_deref() == Some(node)).and_then(|pool| pool.layout.clone())
        };
        listed(&mut writer, [slices("n1", 1), slices("n2", 1)].concat());
        let before = store.latest();
        listed(&mut writer, [slices("n1", 1), slices("n2", 2)].concat());
        let (one, other) = (layout(&before, "n1").expect("one"), layout(&store.latest(), "n1").expect("one"));
        assert!(Arc::ptr_eq(&one, &other));
        let (one, other) = (layout(&before, "n2").expect("one"), layout(&store.latest(), "n2").expect("one"));
        assert_eq!((one.generation, other.generation), (1, 2));
    }

    #[test]
    fn a_copy_tells_of_each_make_once_as_the_index_does() {
        let mut writer = SnapshotWriter::new(DRIVER);
        let store = writer.store();
        listed(&mut writer, [slices("n1", 1), slices("n2", 1)].concat());
        assert_eq!(writer.index.makes_published().count(), 1);
        assert_eq!(store.latest().makes_published().count(), 1);
    }
}
