//! The list of DeviceClasses that can select this driver's devices, for the admission policy on tolerations.

use super::Effect;
use super::Reconciler;
use crate::writer::Job;
use std::time::{Duration, Instant};

/// The time after which a failed write of the list is repeated.
const CLASSES_RETRY: Duration = Duration::from_secs(10);

impl Reconciler {
    /// Writes the list of classes that can select this driver's devices, if it changed.
    pub(super) fn publish_classes(&mut self, _now: Instant) {
        if !self.is_synced() {
            return;
        }
        let driver = self.index.driver().to_owned();
        let mut names: Vec<String> = self
            .index
            .classes()
            .filter(|class| self.matcher.may_select(&driver, class))
            .map(|class| class.name.to_string())
            .collect();
        names.sort();
        if self.classes_written.as_ref() != Some(&names) {
            self.classes_failed = None;
            self.classes_written = Some(names.clone());
            self.effects.push(Effect::Do(Job::Classes { names }));
        }
    }

    /// Writes the list again some time after a failure.
    pub(super) fn publish_classes_again(&mut self, now: Instant) {
        if self.classes_failed.is_some_and(|at| now.saturating_duration_since(at) >= CLASSES_RETRY) {
            self.publish_classes(now);
        }
    }

    /// Returns the time of the next attempt after a failure; `None` if the last write did not fail.
    pub(super) fn next_publication_of_classes(&self) -> Option<Instant> {
        self.classes_failed.map(|at| at + CLASSES_RETRY)
    }
}
