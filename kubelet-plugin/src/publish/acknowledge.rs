//! Handles errors of GPUs that an administrator has acknowledged. [`aliquot_model::acknowledge`] reads the
//! Node's annotations. This module clears the lasting causes of a GPU's health accordingly, and reports it.

use super::Publisher;
use crate::notice;
use crate::reasons;
use aliquot_model::acknowledge::Acknowledgements;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use std::collections::BTreeSet;

impl Publisher {
    /// Applies a Node's annotations. The changed health wakes the task that publishes it.
    pub(super) fn acknowledge(&mut self, node: &Node) {
        let now = Timestamp::now();
        let read = |annotations| Acknowledgements::read(annotations, now);
        let said = node.metadata.annotations.as_ref().map(read).unwrap_or_default();
        for (gpu, said) in &said.gpus {
            let mut cleared = Vec::new();
            self.monitor.change(|health, _| cleared = health.acknowledge(gpu, said.at, now));
            if !cleared.is_empty() {
                self.events.node_normal(reasons::GPU_ACKNOWLEDGED, notice::acknowledged(gpu, said, &cleared));
            }
        }
        let ignored: BTreeSet<String> = said.not_understood.into_iter().collect();
        let note = |name: &String| notice::acknowledgement_ignored(name, &self.settings.node);
        for name in ignored.difference(&self.told_acknowledgements) {
            self.events.node_warning(reasons::ACKNOWLEDGEMENT_IGNORED, note(name));
        }
        self.readiness.notes.set("acknowledgement", ignored.iter().map(note).collect());
        self.told_acknowledgements = ignored;
    }
}
