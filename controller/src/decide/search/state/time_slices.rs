//! Which time slices a GPU's holders asked for: it has one at a time.

use super::State;
use crate::decide::ask::Ask;
use crate::decide::search::View;
use crate::index::{Device, Sym};
use aliquot_model::config::TimeSliceInterval;
use std::collections::{BTreeSet, HashMap};

/// By view and device.
pub(super) type TimeSlices = HashMap<(usize, Sym), BTreeSet<TimeSliceInterval>>;

/// What holders of devices asked for; nothing where no claim of ours asks for an interval.
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
    /// Whether somebody on a GPU asked for another time slice.
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
