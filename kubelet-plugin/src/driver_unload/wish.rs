//! Holds the wish to unload the driver, for all tasks that it concerns.

use parking_lot::Mutex;
use std::sync::Arc;

/// The label that asks for the driver now, for the tasks that prepare claims.
#[derive(Debug, Clone, Default)]
pub struct Wish(Arc<Mutex<Option<String>>>);

impl Wish {
    /// Returns the label, as `name=value`.
    pub fn label(&self) -> Option<String> {
        self.0.lock().clone()
    }

    /// Notes the label that asks for the driver, or that none does.
    pub fn set(&self, label: Option<String>) {
        *self.0.lock() = label;
    }
}
