//! The way of a launch through gate and learner: the order of look-ups, charges, events and waits.
//!
//! The caller provides clock, driver and lock ([`Host`]): real ones in the limiter's core, virtual ones in
//! the simulation. Nothing in this module waits; a caller that is told to come again sleeps until then.

pub use crate::gate::Ask;
use crate::lease::{Lease, Purse, Room};
use crate::meter::{Begins, Launch, Meter, Others, Pending, Plan, STREAMS, Seen};
use crate::spans::Span;
use crate::till::Till;

/// The longest sleep before events are looked at again, in nanoseconds, because refunds can come earlier.
const NAP_NS: u64 = 5_000_000;
/// The longest sleep of a launch whose cost is not known yet, in nanoseconds.
const SHORT_NAP_NS: u64 = 200_000;
/// How much further apart two events may seem than the time since their launch, in nanoseconds.
const SLACK_NS: u64 = 1_000_000;
/// The number of measurements taken at one look.
const TAKEN: usize = 8;

/// The gate's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The launch may go. It is charged to this account, with a lease on top.
    Go(u32, Lease),
    /// The launch may not go before this time.
    Wait(u64),
    /// The share has no limit.
    Free,
}

/// State of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The GPU has reached the event.
    Yes,
    /// The GPU has not reached the event yet.
    No,
    /// The event cannot be read.
    Lost,
}

/// How launches can be timed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// Launches can be timed singly and in windows of several streams.
    Windows,
    /// Each launch can be timed only by itself, on its own stream: a capture is open somewhere.
    Alone,
    /// Launches cannot be timed at all.
    No,
}

/// Clock, driver and state of one process on one device.
pub trait Host {
    /// Returns the time in nanoseconds of the monotonic clock.
    fn now_ns(&self) -> u64;
    /// Runs `part` with the learner locked. Meanwhile no function of the host but [`timing`](Host::timing) is
    /// called.
    fn meter<T>(&self, part: impl FnOnce(&mut Meter) -> T) -> T;
    /// Returns the state of the fast path.
    fn till(&self) -> &Till;
    /// Returns the purse with the process's leases; `None` if the process can have none.
    fn purse(&self) -> Option<&Purse>;
    /// Returns the time that the process may hold in leases now, in nanoseconds
    /// ([`crate::lease::allowance_ns`]).
    fn allowance_ns(&self) -> u64;
    /// Returns the account that leases are charged to.
    fn account(&self, is_borrowed: bool) -> u32;
    /// Gives back to the share a lease that was taken out of a purse.
    fn give_back(&self, lease: Lease);
    /// Gives back to the process's own account what backed a lease ([`crate::own`]).
    fn give_back_own(&self, lease: Lease);
    /// Returns how a launch can be timed. This is asked once more with the learner locked: that answer holds
    /// until the thread that begins a capture has had the learner.
    fn timing(&self, _launch: &Launch) -> Timing {
        Timing::Windows
    }
    /// Asks the gate for a launch.
    fn admit(&self, now_ns: u64, ask: Ask) -> Answer;
    /// Charges an account (`delta_ns` above zero) or refunds it (below zero).
    fn correct(&self, account: u32, delta_ns: i64);
    /// Notes that a launch that is not timed will be on the GPU for about `wall_ns`.
    fn untimed(&self, account: u32, wall_ns: u64);
    /// Notes a measurement for the node agent.
    fn log(&self, account: u32, seen: &Seen);
    /// Notes whether launches run whose end is not known.
    fn is_pending(&self, pending: bool);
    /// Returns what is known of other processes on the GPU.
    fn others(&self) -> Others;
    /// Records an event of the current context on a stream. Returns false if that failed.
    fn record(&self, event: usize, stream: u64) -> bool;
    /// Returns the state of an event.
    fn reached(&self, event: usize) -> Reached;
    /// Returns the nanoseconds from one event to another; `None` until the GPU has reached both.
    fn between(&self, from: usize, to: usize) -> Option<i64>;
    /// Returns true if this thread may look at events now: only one thread does at a time.
    fn may_look(&self) -> bool;
    /// Ends the look that [`may_look`](Host::may_look) allowed.
    fn has_looked(&self);
}

/// The answer to a launch's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The launch may go; the ticket is to be handed back to [`after`].
    Go(Ticket),
    /// The launch has to ask again at this time.
    Wait(u64),
    /// The share has no limit.
    Free,
}

/// A launch that was allowed to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    account: u32,
    charged_ns: u64,
    plan: Plan,
    is_short: bool,
    /// True if the GPU had nothing to do before the launch.
    is_idle: bool,
    /// The time at which the driver was called.
    called_ns: u64,
}

/// The charge of a launch, and the account that it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paid {
    account: u32,
    ns: u64,
}

impl Ticket {
    /// Returns what the launch was charged.
    pub fn paid(&self) -> Paid {
        Paid { account: self.account, ns: self.charged_ns }
    }

    /// Returns true if events are to be recorded behind the launch.
    pub fn is_timed(&self) -> bool {
        self.plan != Plan::default()
    }
}

/// Asks for a launch. `may_time` is true if events can be recorded on its stream, as far as the host allows
/// it at all.
pub fn before<H: Host>(host: &H, cell: usize, launch: &Launch, may_time: bool) -> Step {
    look(host, launch.context);
    let now = host.now_ns();
    let timing = || if may_time { host.timing(launch) } else { Timing::No };
    let is_timed = timing() != Timing::No;
    let (prediction, ahead_ns) = host.meter(|meter| {
        let prediction = match is_timed {
            true => meter.predict(launch.key, now),
            false => meter.predict_untimed(launch.key, now),
        };
        (prediction, meter.backlog(now))
    });
    let charged_ns = prediction.cost_ns;
    let is_short = prediction.is_short;
    let purse = if is_short { host.purse() } else { None };
    let spent = purse.and_then(|purse| host.till().spend(purse, cell, charged_ns));
    let refill = purse.filter(|_| spent.is_none()).and_then(|purse| Some((purse, host.till().refill()?)));
    let (mut room, mut spent) = (Room::default(), spent);
    if let Some((purse, _)) = &refill {
        compare(host, purse);
        room = Room { allowance_ns: host.allowance_ns(), held_ns: purse.held_ns() };
        if room.is_full() {
            spent = gather(host, purse, cell, charged_ns);
        }
    }
    let account = match spent {
        Some(is_borrowed) => host.account(is_borrowed),
        None => {
            let ask = Ask {
                slot: usize::MAX,
                cost_ns: charged_ns,
                is_short,
                room,
                is_known: prediction.is_known,
                ahead_ns,
            };
            match host.admit(now, ask) {
                Answer::Go(account, lease) => {
                    if let Some((purse, _)) = &refill {
                        keep(host, purse, cell, lease, room.allowance_ns);
                    }
                    account
                }
                Answer::Wait(until) => {
                    host.meter(|meter| {
                        meter.waits();
                        host.till().watch(meter.is_watching());
                    });
                    let nap = if prediction.is_known { NAP_NS } else { SHORT_NAP_NS };
                    return Step::Wait(until.min(now.saturating_add(nap)));
                }
                Answer::Free => return Step::Free,
            }
        }
    };
    drop(refill);
    let mut plan = host.meter(|meter| {
        let plan = match timing() {
            Timing::Windows => meter.launch(launch, account, charged_ns, now),
            Timing::Alone => meter.launch_alone(launch, account, charged_ns, now),
            Timing::No => return Plan::default(),
        };
        host.till().watch(meter.is_watching());
        plan
    });
    let (mut is_idle, mut called_ns) = (false, 0);
    if let Some(event) = plan.before {
        if !host.record(event, launch.stream) {
            close(host, &plan, false, Begins::default());
            plan = Plan::default();
        } else if plan.single.is_some() {
            is_idle = host.reached(event) == Reached::Yes;
            called_ns = host.now_ns();
        }
    }
    Step::Go(Ticket { account, charged_ns, plan, is_short, is_idle, called_ns })
}

/// Makes a purse and its backing equal again. There is less in the purse where others have taken back what
/// was too much, and more where somebody has written into it.
fn compare<H: Host>(host: &H, purse: &Purse) {
    let backing = host.till().backing();
    let (backed, held) = (backing.held_ns(), purse.held_ns());
    if backed > held {
        backing.trim(held).into_iter().for_each(|lease| host.give_back_own(lease));
    } else if held > backed {
        purse.trim(backed).into_iter().for_each(|lease| host.give_back(lease));
    }
}

/// Pays a short launch out of all cells together, where there is no room for another lease. Returns true if
/// that time was borrowed, or `None` if there was too little.
fn gather<H: Host>(host: &H, purse: &Purse, cell: usize, cost_ns: u64) -> Option<bool> {
    let backing = host.till().backing();
    let more = |[own, borrowed]: [Lease; 2]| if own.ns >= borrowed.ns { own } else { borrowed };
    let (shown, backed) = (purse.trim(0), backing.trim(0));
    // The time that is kept is both in the purse and backed; the rest is given back where it was.
    let most = more(backed);
    let has = |of: &[Lease; 2]| {
        of.iter().find(|lease| lease.is_borrowed == most.is_borrowed).map_or(0, |lease| lease.ns)
    };
    let kept = Lease { ns: has(&shown).min(most.ns), ..most };
    let rest = |lease: Lease| match lease.is_borrowed == kept.is_borrowed {
        true => Lease { ns: lease.ns.saturating_sub(kept.ns), ..lease },
        false => lease,
    };
    for lease in shown {
        host.give_back(rest(lease));
    }
    for lease in backed {
        host.give_back_own(rest(lease));
    }
    put(host, purse, cell, kept);
    host.till().spend(purse, cell, cost_ns)
}

/// Puts a lease into a cell of the purse and of its backing; time of the other kind that was there is given
/// back.
fn put<H: Host>(host: &H, purse: &Purse, cell: usize, lease: Lease) {
    // Nothing is spent that is not in both.
    host.give_back_own(host.till().backing().put(cell, lease));
    host.give_back(purse.put(cell, lease));
}

/// Keeps a lease for the next launches.
fn keep<H: Host>(host: &H, purse: &Purse, cell: usize, lease: Lease, allowed_ns: u64) {
    if lease.ns == 0 {
        return;
    }
    put(host, purse, cell, lease);
    host.meter(|meter| meter.passed(lease.ns));
    // A process that has come meanwhile may have looked before the lease was there.
    let allowance = host.allowance_ns();
    if allowance < allowed_ns {
        purse.trim(allowance).into_iter().for_each(|lease| host.give_back(lease));
    }
}

/// Refunds a launch that was not made.
pub fn refund<H: Host>(host: &H, paid: Paid) {
    host.correct(paid.account, i64::try_from(paid.ns).unwrap_or(i64::MAX).saturating_neg());
}

/// Completes a launch that was allowed to go: the driver has made it (`is_made`) or refused it.
pub fn after<H: Host>(host: &H, launch: &Launch, ticket: &Ticket, is_made: bool) {
    let plan = &ticket.plan;
    if !is_made {
        refund(host, ticket.paid());
    } else if plan.single.is_none() && !ticket.is_short {
        host.untimed(ticket.account, host.meter(|meter| meter.usual_wall_ns(launch.key)));
    }
    if !ticket.is_timed() {
        return;
    }
    let mut is_good = is_made;
    let mut begins = Begins::default();
    if let Some(place) = plan.single {
        let now = host.now_ns();
        // The launch is made somewhere in the call. A thread that is stopped behind it must not make the
        // kernel look shorter, so no more of the call counts than what all calls take, and never much of the
        // kernel.
        let call = host.meter(|meter| meter.call(now.saturating_sub(ticket.called_ns)));
        let call = call.min(ticket.charged_ns / 16);
        if ticket.is_idle {
            begins = Begins { from_ns: ticket.called_ns.saturating_add(call), until_ns: now };
        }
        let end = host.meter(|meter| meter.end_of(place));
        is_good &= end.is_some_and(|end| host.record(end, launch.stream));
    }
    if let Some(window) = plan.closes {
        let (lanes, count) = host.meter(|meter| meter.lanes(window));
        for (stream, end) in lanes.iter().take(count) {
            is_good &= is_made && host.record(*end, *stream);
        }
    }
    if plan.single.is_some() && is_good {
        host.is_pending(true);
    }
    if plan.single.is_some() || plan.closes.is_some() || !is_good {
        close(host, plan, is_good, begins);
    }
}

fn close<H: Host>(host: &H, plan: &Plan, is_good: bool, begins: Begins) {
    host.meter(|meter| {
        meter.launched(plan, is_good, begins);
        host.till().watch(meter.is_watching());
    });
}

/// Takes in what finished launches of a context show.
pub fn look<H: Host>(host: &H, context: u64) {
    if !host.meter(|meter| meter.has_pending()) || !host.may_look() {
        return;
    }
    let mut after = 0;
    for _ in 0..TAKEN {
        let next = host.meter(|meter| meter.next(context, after));
        let Some((pending, order)) = next else { break };
        if !take(host, context, pending) {
            after = order;
        }
    }
    // A window ends behind the launches in it, so those come first.
    if let Some(window) = host.meter(|meter| meter.closed(context)) {
        take(host, context, window);
    }
    host.has_looked();
    host.is_pending(host.meter(|meter| meter.has_singles()));
}

/// Takes in one measurement. Returns false if the GPU has not reached its events yet.
fn take<H: Host>(host: &H, context: u64, pending: Pending) -> bool {
    let ((pairs, count), reference) = host.meter(|meter| (meter.pairs(pending), meter.reference(context)));
    let pairs = pairs.get(..count).unwrap_or_default();
    for (_, end) in pairs {
        match host.reached(*end) {
            Reached::Yes => {}
            Reached::No => return false,
            Reached::Lost => {
                host.meter(|meter| meter.abandon(pending));
                return true;
            }
        }
    }
    let Some(zero) = reference.or_else(|| pairs.first().map(|pair| pair.0)) else { return true };
    let place = |event: usize| if event == zero { Some(0) } else { host.between(zero, event) };
    let longest = host.meter(|meter| meter.age(pending, host.now_ns())).saturating_add(SLACK_NS);
    let mut spans = [Span::default(); STREAMS];
    let mut is_good = !pairs.is_empty();
    for (span, (start, end)) in spans.iter_mut().zip(pairs) {
        match (place(*start), host.between(*start, *end)) {
            (Some(from), Some(length)) if length >= 0 && length.unsigned_abs() <= longest => {
                *span = Span { start: from, end: from.saturating_add(length) };
            }
            _ => is_good = false,
        }
    }
    if !is_good {
        host.meter(|meter| meter.abandon(pending));
        return true;
    }
    let covered_from = match pending {
        Pending::Single(_) => None,
        Pending::Window(_) => host
            .meter(|meter| meter.running(context))
            .filter(|start| host.reached(*start) == Reached::Yes)
            .and_then(place),
    };
    let others = host.others();
    let spans = spans.get(..count).unwrap_or_default();
    let now = host.now_ns();
    let mut publish = |key, cost| host.till().publish(key, cost);
    let finding = host.meter(|meter| meter.finish(pending, spans, covered_from, others, now, &mut publish));
    host.correct(finding.account, finding.delta_ns);
    if let Some(seen) = finding.seen {
        host.log(finding.account, &seen);
    }
    true
}
