//! What the partitions of the cluster's boards have, by profile.

use crate::decide::Matcher;
use crate::decide::matcher::Answer;
use crate::govern::check::text_of;
use crate::index::{Class, Index, Layout};
use crate::quantity::Quantity;
use aliquot_model::{DeviceKind, DeviceName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a partition has that a program can notice; a substitute has at least as much of each.
const DIMENSIONS: [&str; 7] =
    ["memory", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"];

/// What partitions of one profile have, over all boards that a request may be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Profile {
    /// Least of each dimension.
    least: [Quantity; DIMENSIONS.len()],
    /// Most of each dimension.
    most: [Quantity; DIMENSIONS.len()],
}

impl Profile {
    /// Whether, on whichever boards, it has all that the other one has.
    pub(super) fn covers(&self, asked: &Self) -> bool {
        self.least.iter().zip(asked.most).all(|(least, most)| *least >= most)
    }

    /// Whether it has more memory or more multiprocessors: one that has only more engines takes the same
    /// places, so it is never free when the other one is not.
    pub(super) fn is_larger(&self, asked: &Self) -> bool {
        self.most.iter().zip(asked.least).take(2).any(|(most, least)| *most > least)
    }

    /// By how many percent it has more memory or more multiprocessors, whichever is more.
    pub(super) fn growth_percent(&self, asked: &Self) -> i128 {
        self.growth(asked, 0).max(self.growth(asked, 1))
    }

    /// What is wasted on whoever asked for the other one, least first: what of memory and compute grows
    /// most, then both together, then the engines.
    pub(super) fn waste(&self, asked: &Self) -> (i128, i128, i128) {
        let engines = (2..DIMENSIONS.len()).map(|at| self.excess(asked, at).0).sum();
        let sum = self.growth(asked, 0).saturating_add(self.growth(asked, 1));
        (self.growth_percent(asked), sum, engines)
    }

    fn growth(&self, asked: &Self, at: usize) -> i128 {
        let (more, of) = self.excess(asked, at);
        if of <= 0 { 0 } else { more.saturating_mul(100) / of }
    }

    /// What it has more than the other one, and what that has.
    fn excess(&self, asked: &Self, at: usize) -> (i128, i128) {
        let figure = |figures: &[Quantity]| figures.get(at).map_or(0, |quantity| quantity.nanos());
        let (more, less) = (figure(&self.most), figure(&asked.least));
        (more.saturating_sub(less), less)
    }
}

/// The profiles of devices that class and selectors select; `None` when a selector fails on a device or time is up, or
/// when something is selected that is no partition.
pub(super) fn selected(
    index: &Index,
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

/// All profiles that are published.
pub(super) fn published(index: &Index) -> BTreeSet<String> {
    crate::govern::check::profiles(index).into_values().flatten().collect()
}

fn profile_of(index: &Index, layout: &Layout, position: u32) -> Option<Profile> {
    layout.devices.get(position as usize)?;
    let figures = DIMENSIONS.map(|name| capacity(index, layout, position, name).unwrap_or_default());
    Some(Profile { least: figures, most: figures })
}

fn capacity(index: &Index, layout: &Layout, position: u32, name: &str) -> Option<Quantity> {
    let device = layout.devices.get(position as usize)?;
    let name = index.find_qualified(name)?;
    let capacities = &index.shape(device).capacities;
    capacities.iter().find(|(known, _)| *known == name).map(|(_, capacity)| capacity.value)
}
