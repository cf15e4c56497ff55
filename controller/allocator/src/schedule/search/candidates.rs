//! The devices of a node's pools that a request can use, whoever holds them now.

use super::super::ask::{Alternative, Ask, Count};
use super::super::capacity::{Consumed, consumption};
use super::super::capacity_shortfall::Lack;
use super::super::matcher::{Answer, Answers, Matcher};
use super::super::miss::{Miss, Published};
use super::super::no_match;
use super::super::reason::{DeviceReason, Rejection};
use super::solution::Failure;
use super::view::View;
use crate::snapshot::{Owner, Snapshot};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The devices of each pool that an alternative can use, whoever holds them now.
pub(super) struct Candidates {
    /// For each pool: the candidates.
    pub(super) devices: Vec<Vec<Candidate>>,
    /// The lack of the nearest device among those that do not have the requested amount.
    pub(super) lack: Option<Lack>,
    /// The condition that no device meets, if the owner has no matching device.
    pub(super) miss: Option<(Miss, Published)>,
}

/// A device that an alternative can use.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) position: u32,
    pub(super) consumed: Consumed,
    /// False for a device that matches but that this owner may not give out; one such device makes `All`
    /// fail.
    pub(super) usable: bool,
}

/// Returns for each device a number that shows for which alternatives it is a candidate.
pub(super) fn marks(views: &[View<'_>], candidates: &[Vec<Vec<Option<Candidates>>>]) -> Vec<Vec<u64>> {
    let mut marks: Vec<Vec<u64>> = views.iter().map(|view| vec![0; view.layout.devices.len()]).collect();
    let found = candidates.iter().flatten().flatten().flatten();
    for (number, found) in (1u64..).zip(found) {
        for (marks, devices) in marks.iter_mut().zip(&found.devices) {
            for candidate in devices {
                if let Some(mark) = marks.get_mut(candidate.position as usize) {
                    let mut hasher = DefaultHasher::new();
                    (*mark, number, candidate.usable).hash(&mut hasher);
                    *mark = hasher.finish();
                }
            }
        }
    }
    marks
}

/// Returns the devices that match class, selectors and capacity, in layout order.
#[expect(clippy::too_many_arguments, reason = "where, for what, and the time that is left")]
pub(super) fn eligible(
    index: &Snapshot,
    matcher: &mut Matcher,
    views: &[View<'_>],
    ask: &Ask<'_>,
    request: &Arc<str>,
    alternative: &Alternative<'_>,
    owner: Owner,
    expired: &mut dyn FnMut() -> bool,
) -> Result<Candidates, Failure> {
    let mut devices = Vec::new();
    // There are few shapes; this stores the amounts taken by shape.
    let mut known: Vec<(u32, Option<Consumed>)> = Vec::new();
    let (mut lack, mut reached, mut found_any) = (None, 0, false);
    let mut layouts = Vec::new();
    for view in views {
        let answers: Vec<Arc<Answers>> = alternative
            .selectors
            .iter()
            .map(|expression| matcher.answers(index, view.layout, expression, expired))
            .collect::<Result<_, _>>()
            .map_err(|_| Failure::OutOfTime)?;
        let mut of_pool = Vec::new();
        for (device, position) in view.layout.devices.iter().zip(0u32..) {
            if ask.among.as_ref().is_some_and(|among| !among.contains(&(view.pool.name, device.name))) {
                continue;
            }
            match selected(&answers, position) {
                Ok(true) => {}
                Ok(false) => {
                    if device.owner == owner {
                        reached = reached.max(no_match::passed(&answers, position));
                    }
                    continue;
                }
                Err(error) => {
                    return Err(Failure::Rejected(Box::new(Rejection::Selector {
                        claim: ask.claim.clone(),
                        request: request.clone(),
                        class: alternative.class.name.clone(),
                        device: format!("{}/{}", index.name(view.pool.name), index.name(device.name)),
                        error,
                    })));
                }
            }
            let consumed = match known.iter().find(|(shape, _)| *shape == device.shape) {
                Some((_, consumed)) => consumed.clone(),
                None => {
                    let consumed = consumption(index.shape(device), alternative);
                    known.push((device.shape, consumed.clone()));
                    consumed
                }
            };
            let Some(consumed) = consumed else {
                if device.owner == owner {
                    reached = answers.len();
                    let found = Lack::of_device(index, view.pool, (device, position), alternative);
                    lack = Lack::nearer(lack, found);
                }
                continue;
            };
            found_any |= device.owner == owner;
            of_pool.push(Candidate { position, consumed, usable: device.owner == owner });
        }
        devices.push(of_pool);
        layouts.push((view.layout, answers));
    }
    let miss = (!found_any).then(|| no_match::find(index, matcher, &layouts, alternative, owner, reached));
    Ok(Candidates { devices, lack, miss })
}

fn selected(answers: &[Arc<Answers>], position: u32) -> Answer {
    for answer in answers {
        match answer.get(position) {
            Some(Ok(true)) => {}
            Some(Ok(false)) | None => return Ok(false),
            Some(Err(error)) => return Err(error.clone()),
        }
    }
    Ok(true)
}

/// Checks quickly whether a request can be met at all.
///
/// # Errors
/// The reason why it cannot.
pub(super) fn enough(
    index: &Snapshot,
    views: &[View<'_>],
    request: &str,
    alternative: &Alternative<'_>,
    found: &Candidates,
) -> Result<(), DeviceReason> {
    let request = alternative.result_name(request);
    let all = || {
        let of_views = views.iter().zip(&found.devices);
        of_views.flat_map(|(view, devices)| devices.iter().map(move |candidate| (view, candidate)))
    };
    let usable = || all().filter(|(_, candidate)| candidate.usable);
    if usable().next().is_none() {
        let (miss, published) = found.miss.clone().unwrap_or((Miss::Amount, Published::new()));
        let (miss, lack) = (Box::new(miss), found.lack.clone().map(Box::new));
        return Err(DeviceReason::NoMatch { request, miss, published, lack });
    }
    let tolerations = alternative.tolerations.as_deref().unwrap_or_default();
    let mut taint = None;
    let mut clean = 0usize;
    for (view, candidate) in usable() {
        let Some(device) = view.layout.devices.get(candidate.position as usize) else { continue };
        match index.repelling_taint(view.pool, device, tolerations) {
            Some(found) => taint = taint.or(Some(found)),
            None => clean += 1,
        }
    }
    let wanted = match alternative.count {
        Count::Exactly(count) => count,
        Count::All => all().count(),
    };
    match (taint, clean < wanted) {
        (Some(taint), true) => Err(DeviceReason::Tainted {
            request,
            taint: if taint.value.is_empty() {
                format!("{}:{}", taint.key, taint.effect)
            } else {
                format!("{}={}:{}", taint.key, taint.value, taint.effect)
            },
        }),
        // A shared device can be taken several times, so fewer devices than wanted may be enough.
        (None, true) if alternative.count == Count::All => Err(DeviceReason::NotAllFree { request }),
        _ => Ok(()),
    }
}
