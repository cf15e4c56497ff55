//! The time slices that a GPU's holders asked for. A GPU has one time slice at a time.

use super::State;
use crate::schedule::ask::Ask;
use crate::schedule::search::view::View;
use crate::snapshot::{Device, Sym};
use aliquot_model::config::TimeSliceInterval;
use std::collections::{BTreeSet, HashMap};

/// The time slices that were asked for, by view and device.
pub(super) type TimeSlices = HashMap<(usize, Sym), BTreeSet<TimeSliceInterval>>;

/// Returns the time slices that the holders of devices asked for; empty if no claim of this search asks for
/// one.
pub(super) fn asked_for(views: &[View<'_>], asks: &[Ask<'_>]) -> TimeSlices {
    let mut found = TimeSlices::new();
    if !asks.iter().any(Ask::asks_for_time_slice) {
        return found;
    }
    for (number, view) in views.iter().enumerate() {
        for holder in &view.pool.holders {
            if let Some(interval) = holder.time_slice {
                found.entry((number, holder.device)).or_default().insert(interval);
            }
        }
    }
    found
}

impl State<'_, '_> {
    /// Returns true if a holder of the device asked for another time slice.
    pub(super) fn is_sliced_otherwise(
        &self,
        view: usize,
        device: &Device,
        position: u32,
        wanted: TimeSliceInterval,
    ) -> bool {
        let held = self.time_slices.get(&(view, device.name)).into_iter().flatten();
        let taken = self.taken(view, position).map(|taken| taken.time_slices.as_slice()).unwrap_or_default();
        held.chain(taken).any(|other| *other != wanted)
    }
}
