//! The devices of a node's pools that a request can use, whoever holds them now.

use super::super::ask::{Alternative, Ask, Count};
use super::super::capacity;
use super::super::capacity_shortfall::Lack;
use super::super::matcher::{Answer, Answers};
use super::super::reason::DeviceReason;
use super::super::{Matcher, Miss, Published, Rejection, no_match};
use super::Failure;
use crate::quantity::Quantity;
use crate::snapshot::{Layout, Owner, Pool, PoolState, Shape, Snapshot, Sym};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// A pool of the node from which devices can be allocated.
pub(super) struct View<'a> {
    pub(super) pool: &'a Pool,
    pub(super) layout: &'a Layout,
}

/// The devices of each pool that an alternative can use, whoever holds them now.
pub(super) struct Candidates {
    /// For each pool: the candidates.
    pub(super) devices: Vec<Vec<Candidate>>,
    /// The lack of the nearest device among those that do not have the requested amount.
    pub(super) lack: Option<Lack>,
    /// The condition that no device meets, if the owner has no matching device.
    pub(super) miss: Option<(Miss, Published)>,
}

/// The amounts taken of each capacity of a device; `None` if the device is not shared.
pub(in crate::schedule) type Consumed = Option<Arc<[Quantity]>>;

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

pub(super) fn views<'a>(
    index: &Snapshot,
    mut pools: Vec<&'a Pool>,
    owner: Owner,
    asks: &[Ask<'_>],
) -> Result<Vec<View<'a>>, Failure> {
    // A pool that is being replaced or contradicts itself could have any devices, so `All` must not miss a
    // part of it. A request for a number of devices can be met from the other pools.
    let alternatives = asks.iter().flat_map(|ask| &ask.requests).flat_map(|request| &request.alternatives);
    let all = alternatives.into_iter().any(|alternative| alternative.count == Count::All);
    let mut views = Vec::new();
    let mut reason = None;
    pools.sort_by_key(|pool| index.name(pool.name));
    for pool in pools {
        match (&pool.state, &pool.layout) {
            (PoolState::Ready, Some(layout)) => {
                let owned = match owner {
                    Owner::Controller => layout.owners.controller,
                    Owner::HandOver => layout.owners.hand_over,
                    Owner::Scheduler => layout.owners.scheduler,
                };
                match (&pool.stopped, owned) {
                    (_, false) if layout.owners.hand_over => {
                        // Times are rounded up to minutes, so that nodes that are handed over at about the
                        // same time are reported together.
                        let until = pool.hand_over_until.map(|until| until.saturating_add(59) / 60 * 60);
                        reason = reason.or(Some(DeviceReason::HandOver(until)));
                    }
                    (_, false) => reason = reason.or(Some(DeviceReason::NotInControllerMode)),
                    (Some(why), true) => reason = reason.or_else(|| Some(DeviceReason::Stopped(why.clone()))),
                    (None, true) => views.push(View { pool, layout }),
                }
            }
            (PoolState::Incomplete { .. }, _) => {
                let why = DeviceReason::Updating(index.name(pool.name).to_owned());
                if all {
                    return Err(Failure::Devices(why));
                }
                reason = reason.or(Some(why));
            }
            (PoolState::Invalid(why), _) => {
                let why = DeviceReason::Invalid(why.to_string());
                if all {
                    return Err(Failure::Devices(why));
                }
                reason = reason.or(Some(why));
            }
            (PoolState::Absent, _) | (PoolState::Ready, None) => {}
        }
    }
    if views.is_empty() {
        return Err(Failure::Devices(reason.unwrap_or(DeviceReason::NotInControllerMode)));
    }
    Ok(views)
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

/// Returns the amounts that an alternative takes of a device's capacities; `Some(None)` if the device is not
/// shared. Returns `None` if the alternative asks for more than there is, for an amount that is not allowed,
/// or for a capacity that the device lacks.
pub(in crate::schedule) fn consumption(shape: &Shape, alternative: &Alternative<'_>) -> Option<Consumed> {
    let known = |name: &Option<Sym>| {
        name.is_some_and(|name| shape.capacities.binary_search_by_key(&name, |(n, _)| *n).is_ok())
    };
    if !alternative.capacities.iter().all(|asked| known(&asked.name)) {
        return None;
    }
    let mut amounts = Vec::with_capacity(shape.capacities.len());
    for (name, capacity) in &shape.capacities {
        let requested =
            alternative.capacities.iter().find(|asked| asked.name == Some(*name)).map(|asked| asked.amount);
        let amount = capacity::consumed(capacity, requested)?;
        if amount > capacity.value {
            return None;
        }
        amounts.push(amount);
    }
    Some(shape.shareable.then(|| amounts.into()))
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
