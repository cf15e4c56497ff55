//! The capacities that the partitions of the cluster's boards have, by profile.

use crate::quantity::Quantity;
use crate::schedule::Matcher;
use crate::schedule::matcher::Answer;
use crate::snapshot::profiles::text_of;
use crate::snapshot::{Class, Layout, Snapshot};
use aliquot_model::{DeviceKind, DeviceName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The capacities of a partition that a program can notice; a substitute has at least as much of each.
const DIMENSIONS: [&str; 7] =
    ["memory", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"];

/// The capacities of the partitions of one profile, over all boards that a request may be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Profile {
    /// The least of each capacity.
    least: [Quantity; DIMENSIONS.len()],
    /// The most of each capacity.
    most: [Quantity; DIMENSIONS.len()],
}

impl Profile {
    /// Returns true if, on any of the boards, this profile has everything that the other one has.
    pub(super) fn covers(&self, asked: &Self) -> bool {
        self.least.iter().zip(asked.most).all(|(least, most)| *least >= most)
    }

    /// Returns true if this profile has more memory or more multiprocessors. A profile that only has more
    /// engines takes the same places, so it is never free when the other one is not.
    pub(super) fn is_larger(&self, asked: &Self) -> bool {
        self.most.iter().zip(asked.least).take(2).any(|(most, least)| *most > least)
    }

    /// Returns by how many percent this profile has more memory or more multiprocessors, whichever is more.
    pub(super) fn growth_percent(&self, asked: &Self) -> i128 {
        self.growth(asked, 0).max(self.growth(asked, 1))
    }

    /// Returns the waste if this profile is given instead of the requested one, as a sort key: the larger
    /// growth of memory and compute, then the sum of both, then the engines.
    pub(super) fn waste(&self, asked: &Self) -> (i128, i128, i128) {
        let engines = (2..DIMENSIONS.len()).map(|at| self.excess(asked, at).0).sum();
        let sum = self.growth(asked, 0).saturating_add(self.growth(asked, 1));
        (self.growth_percent(asked), sum, engines)
    }

    fn growth(&self, asked: &Self, at: usize) -> i128 {
        let (more, of) = self.excess(asked, at);
        if of <= 0 { 0 } else { more.saturating_mul(100) / of }
    }

    /// Returns how much more this profile has of a capacity than the other one, and how much the other one
    /// has.
    fn excess(&self, asked: &Self, at: usize) -> (i128, i128) {
        let figure = |figures: &[Quantity]| figures.get(at).map_or(0, |quantity| quantity.nanos());
        let (more, less) = (figure(&self.most), figure(&asked.least));
        (more.saturating_sub(less), less)
    }
}

/// Returns the profiles of the devices that class and selectors select; `None` if a selector fails on a
/// device, if the time is up, or if a selected device is not a partition.
pub(super) fn selected(
    index: &Snapshot,
    matcher: &mut Matcher,
    class: &Class,
    selectors: &[Arc<str>],
) -> Option<BTreeMap<String, Profile>> {
    let own = selectors.iter().cloned().map(Some);
    let expressions: Vec<Arc<str>> = class.selectors.iter().cloned().chain(own).collect::<Option<_>>()?;
    for expression in &expressions {
        matcher.compile_until(index.driver(), expression).ok()?;
    }
    let name = index.find_qualified("profile");
    let mut found: BTreeMap<String, Profile> = BTreeMap::new();
    for layout in matcher.layouts(index, &expressions) {
        let answers = expressions.iter().map(|e| matcher.answers_until(index, layout, e));
        let answers: Vec<_> = answers.collect::<Result<_, _>>().ok()?;
        'devices: for (position, device) in (0u32..).zip(layout.devices.iter()) {
            for answer in answers.iter().map(|answers| answers.get(position)) {
                match answer {
                    Some(Answer::Ok(true)) => {}
                    Some(Answer::Ok(false)) => continue 'devices,
                    _ => return None,
                }
            }
            let kind = DeviceName::parse(index.name(device.name)).map(|name| name.kind());
            if kind != Some(DeviceKind::Mig) {
                return None;
            }
            let profile = text_of(index, layout.attribute(position, name?)?)?;
            let here = profile_of(index, layout, position)?;
            match found.get_mut(profile) {
                None => {
                    found.insert(profile.to_owned(), here);
                }
                Some(known) => merge(known, &here),
            }
        }
    }
    Some(found)
}

fn merge(known: &mut Profile, here: &Profile) {
    for (known, here) in known.least.iter_mut().zip(here.least) {
        *known = (*known).min(here);
    }
    for (known, here) in known.most.iter_mut().zip(here.most) {
        *known = (*known).max(here);
    }
}

/// Returns all profiles that are published.
pub(super) fn published(index: &Snapshot) -> BTreeSet<String> {
    crate::snapshot::profiles::profiles(index).into_values().flatten().collect()
}

fn profile_of(index: &Snapshot, layout: &Layout, position: u32) -> Option<Profile> {
    layout.devices.get(position as usize)?;
    let figures = DIMENSIONS.map(|name| capacity(index, layout, position, name).unwrap_or_default());
    Some(Profile { least: figures, most: figures })
}

fn capacity(index: &Snapshot, layout: &Layout, position: u32, name: &str) -> Option<Quantity> {
    let device = layout.devices.get(position as usize)?;
    let name = index.find_qualified(name)?;
    let capacities = &index.shape(device).capacities;
    capacities.iter().find(|(known, _)| *known == name).map(|(_, capacity)| capacity.value)
}
