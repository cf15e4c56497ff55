//! Faults on request: what goes wrong, for which requests, and how often.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;

mod lasting;

use lasting::{Ear, Lasting, Silence};

/// Which requests a fault is for. Every field that is given must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Matcher {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `apply`, `delete`, `deletecollection`;
    /// `write` stands for all that change something. Empty for any.
    pub verbs: Vec<String>,
    /// API group; the core group is the empty string.
    pub group: Option<String>,
    /// Plural name of the resource.
    pub resource: Option<String>,
    /// Subresource; the empty string means none.
    pub subresource: Option<String>,
    /// Namespace.
    pub namespace: Option<String>,
    /// Object name, also of an object that is to be made; `web-*` for all that begin so.
    pub name: Option<String>,
    /// User, exactly.
    pub user: Option<String>,
    /// A part of the user agent.
    pub user_agent: Option<String>,
}

impl Matcher {
    /// Requests for one resource with one verb.
    #[must_use]
    pub fn new(verb: &str, resource: &str) -> Self {
        Self { verbs: vec![verb.to_owned()], resource: Some(resource.to_owned()), ..Self::default() }
    }

    /// Every request with this verb.
    #[must_use]
    pub fn verb(verb: &str) -> Self {
        Self { verbs: vec![verb.to_owned()], ..Self::default() }
    }

    /// Every request for this resource.
    #[must_use]
    pub fn resource(resource: &str) -> Self {
        Self { resource: Some(resource.to_owned()), ..Self::default() }
    }

    /// Narrowed to one subresource.
    #[must_use]
    pub fn subresource(mut self, subresource: &str) -> Self {
        self.subresource = Some(subresource.to_owned());
        self
    }

    /// Narrowed to one name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Narrowed to one user.
    #[must_use]
    pub fn by(mut self, user: &str) -> Self {
        self.user = Some(user.to_owned());
        self
    }

    fn matches(&self, call: &Call) -> bool {
        let same = |want: &Option<String>, have: &str| want.as_deref().is_none_or(|w| w == have);
        (self.verbs.is_empty() || self.verbs.iter().any(|v| verb_matches(v, &call.verb)))
            && same(&self.group, &call.group)
            && same(&self.resource, &call.resource)
            && same(&self.subresource, &call.subresource)
            && same(&self.namespace, &call.namespace)
            && self.name.as_deref().is_none_or(|w| name_matches(w, &call.name))
            && same(&self.user, &call.user)
            && self.user_agent.as_deref().is_none_or(|w| call.user_agent.contains(w))
    }
}

fn name_matches(want: &str, have: &str) -> bool {
    want == have || want.strip_suffix('*').is_some_and(|beginning| have.starts_with(beginning))
}

fn verb_matches(want: &str, have: &str) -> bool {
    want == have
        || (want == "write" && !matches!(have, "get" | "list" | "watch"))
        || (want == "patch" && have == "apply")
}

/// What goes wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Fault {
    /// The answer is this failure; nothing is done.
    Status {
        /// HTTP code, such as 500 or 429.
        code: u16,
        /// Reason of the Status object.
        reason: String,
        /// Message of the Status object.
        message: String,
        /// Seconds after which to try again.
        #[serde(default)]
        retry_after: Option<u64>,
    },
    /// A conflict, as if somebody else had been faster; nothing is done.
    Conflict,
    /// What was asked is done late, also when nobody waits for the answer any more.
    Latency {
        /// By how much.
        millis: u64,
    },
    /// The server gives up: 504, and nothing is done.
    Timeout,
    /// The server takes the request and is silent, then closes the connection; nothing is done.
    Hang {
        /// For how long it is silent.
        millis: u64,
    },
    /// Nothing goes wrong; the request is on record: [`Faults::noted`].
    Note,
    /// Nothing is heard of the request's user any more, as of a process that is killed here: what it sends from now on
    /// is neither carried out nor answered. [`Faults::is_cut_off`] says when that is so.
    CutOff {
        /// Whether this request is carried out; its answer is lost in any case.
        carried_out: bool,
    },
    /// From this request on watches of a resource by its user are silent, as behind an API server that lags. What this
    /// request writes is not seen either. Lasts until [`Faults::end_silence`].
    Silence {
        /// Plural name of the resource.
        resource: String,
    },
    /// The connection breaks before anything is done.
    DropBefore,
    /// The request is carried out, and the connection breaks before the answer.
    DropAfter,
    /// The watch ends properly after so many events.
    WatchClose {
        /// Events that still pass.
        after_events: u64,
    },
    /// The connection of the watch breaks after so many events.
    WatchReset {
        /// Events that still pass.
        after_events: u64,
    },
    /// The watch is told that its version is too old (410) after so many events.
    WatchExpire {
        /// Events that still pass.
        after_events: u64,
    },
    /// The watch falls silent after so many events, and goes on later.
    WatchStall {
        /// Events that still pass.
        after_events: u64,
        /// For how long.
        millis: u64,
    },
}

/// A fault, for whom, and how often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FaultRule {
    /// The requests it is for.
    #[serde(default)]
    pub matches: Matcher,
    /// How many matching requests pass unharmed first.
    #[serde(default)]
    pub skip: u64,
    /// How many are then hit; `None` for all.
    #[serde(default)]
    pub times: Option<u64>,
    /// What happens to them.
    pub fault: Fault,
}

impl FaultRule {
    /// Hits every matching request.
    #[must_use]
    pub const fn always(matches: Matcher, fault: Fault) -> Self {
        Self { matches, skip: 0, times: None, fault }
    }

    /// Hits the n-th matching request (counted from 1) and no other.
    #[must_use]
    pub const fn nth(n: u64, matches: Matcher, fault: Fault) -> Self {
        Self { matches, skip: n.saturating_sub(1), times: Some(1), fault }
    }

    /// Hits the first `n` matching requests.
    #[must_use]
    pub const fn first(n: u64, matches: Matcher, fault: Fault) -> Self {
        Self { matches, skip: 0, times: Some(n), fault }
    }
}

/// A rule in force, and what it has done so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultState {
    /// Names the rule for its removal.
    pub id: u64,
    /// The rule.
    pub rule: FaultRule,
    /// Matching requests so far.
    pub seen: u64,
    /// Requests hit so far.
    pub hits: u64,
}

/// A request, as faults see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Call {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `apply`, `delete`, `deletecollection`.
    pub verb: String,
    /// API group; empty for the core group.
    pub group: String,
    /// Plural name of the resource.
    pub resource: String,
    /// `status`, `binding`, …; empty for the object itself.
    pub subresource: String,
    /// The object's namespace; empty for cluster-scoped kinds.
    pub namespace: String,
    /// The object's name; of one that is to be made what its body says.
    pub name: String,
    /// The user.
    pub user: String,
    /// The `User-Agent` header.
    pub user_agent: String,
}

/// What befalls one request.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) latency: Duration,
    pub(crate) fault: Option<Fault>,
}

/// How a live watch is ended from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchEnd {
    /// As a time-out ends it.
    Close,
    /// The connection breaks.
    Reset,
    /// With 410 Expired.
    Expire,
}

pub(crate) struct WatchControl {
    pub(crate) stop: CancellationToken,
    end: Mutex<WatchEnd>,
    call: Call,
    ear: Ear,
}

impl WatchControl {
    pub(crate) fn end(&self) -> WatchEnd {
        *self.end.lock()
    }

    /// Waits while this watch is to be silent, unless it is ended.
    pub(crate) async fn silence(&self) {
        self.ear.wait(&self.call).await;
    }
}

#[derive(Default)]
struct State {
    rules: Vec<FaultState>,
    watches: Vec<std::sync::Weak<WatchControl>>,
    lasting: Lasting,
}

/// The faults of one control plane.
#[derive(Default)]
pub struct Faults {
    state: Mutex<State>,
    next: AtomicU64,
    silence: Arc<Silence>,
    down: tokio::sync::watch::Sender<bool>,
}

impl Faults {
    /// Puts a rule in force; the number removes it again.
    pub fn add(&self, rule: FaultRule) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.state.lock().rules.push(FaultState { id, rule, seen: 0, hits: 0 });
        id
    }

    /// Removes a rule; false when there is none of that number.
    pub fn remove(&self, id: u64) -> bool {
        let mut state = self.state.lock();
        let before = state.rules.len();
        state.rules.retain(|r| r.id != id);
        state.rules.len() < before
    }

    /// Removes all rules and ends an outage, silence, and being cut off; forgets what was noted.
    pub fn clear(&self) {
        self.state.lock().rules.clear();
        self.end_lasting();
        self.set_outage(false);
    }

    /// The rules with their counts.
    #[must_use]
    pub fn rules(&self) -> Vec<FaultState> {
        self.state.lock().rules.clone()
    }

    /// How often a rule has hit.
    #[must_use]
    pub fn hits(&self, id: u64) -> u64 {
        self.state.lock().rules.iter().find(|r| r.id == id).map_or(0, |r| r.hits)
    }

    /// Ends the matching watches that are open now; how many there were.
    pub fn end_watches(&self, matches: &Matcher, how: WatchEnd) -> usize {
        let mut state = self.state.lock();
        state.watches.retain(|w| w.strong_count() > 0);
        let mut ended = 0;
        for watch in state.watches.iter().filter_map(std::sync::Weak::upgrade) {
            if matches.matches(&watch.call) && !watch.stop.is_cancelled() {
                *watch.end.lock() = how;
                watch.stop.cancel();
                ended += 1;
            }
        }
        ended
    }

    /// How many matching watches are open.
    #[must_use]
    pub fn open_watches(&self, matches: &Matcher) -> usize {
        let state = self.state.lock();
        state
            .watches
            .iter()
            .filter_map(std::sync::Weak::upgrade)
            .filter(|w| !w.stop.is_cancelled() && matches.matches(&w.call))
            .count()
    }

    /// While on, all connections break and no new one is served.
    pub fn set_outage(&self, on: bool) {
        self.down.send_replace(on);
    }

    pub(crate) fn outage(&self) -> tokio::sync::watch::Receiver<bool> {
        self.down.subscribe()
    }

    pub(crate) fn judge(&self, call: &Call) -> Verdict {
        let mut guard = self.state.lock();
        let State { rules, lasting, .. } = &mut *guard;
        if let Some(verdict) = lasting.judge(call) {
            return verdict;
        }
        let mut verdict = Verdict::default();
        for state in rules {
            if !state.rule.matches.matches(call) {
                continue;
            }
            state.seen += 1;
            let past_skip = state.seen > state.rule.skip;
            let left = state.rule.times.is_none_or(|t| state.hits < t);
            if !past_skip || !left {
                continue;
            }
            match &state.rule.fault {
                Fault::Latency { millis } => verdict.latency += Duration::from_millis(*millis),
                fault if verdict.fault.is_none() => {
                    if lasting.begin(fault, call, &self.silence) {
                        verdict.fault = Some(fault.clone());
                    }
                }
                _ => continue,
            }
            state.hits += 1;
        }
        verdict
    }

    pub(crate) fn register(&self, call: Call, stop: CancellationToken) -> Arc<WatchControl> {
        let control = Arc::new(WatchControl {
            ear: Ear { silence: self.silence.clone(), stop: stop.clone() },
            stop,
            end: Mutex::new(WatchEnd::Close),
            call,
        });
        let mut state = self.state.lock();
        state.watches.retain(|w| w.strong_count() > 0);
        state.watches.push(Arc::downgrade(&control));
        control
    }
}

/// The failure that a fault answers with, if it answers.
pub(crate) fn answer(fault: &Fault, call: &Call) -> Option<ApiError> {
    let qualified = if call.group.is_empty() {
        call.resource.clone()
    } else {
        format!("{}.{}", call.resource, call.group)
    };
    match fault {
        Fault::Status { code, reason, message, retry_after } => {
            let mut e = ApiError::new(*code, reason, message.clone());
            e.retry_after = *retry_after;
            Some(e)
        }
        Fault::Conflict => Some(ApiError::new(
            409,
            "Conflict",
            format!(
                "Operation cannot be fulfilled on {qualified} \"{}\": the object has been modified; \
                 please apply your changes to the latest version and try again",
                call.name
            ),
        )),
        Fault::Timeout => Some(ApiError::new(
            504,
            "Timeout",
            "Timeout: request did not complete within the allotted timeout",
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(verb: &str, resource: &str) -> Call {
        Call { verb: verb.into(), resource: resource.into(), ..Call::default() }
    }

    #[test]
    fn the_nth_matching_request_is_hit_and_no_other() {
        let faults = Faults::default();
        let id = faults.add(FaultRule::nth(2, Matcher::new("write", "pods"), Fault::Conflict));
        let hits: Vec<bool> = ["get", "create", "patch", "delete"]
            .iter()
            .map(|v| faults.judge(&call(v, "pods")).fault.is_some())
            .collect();
        assert_eq!(hits, [false, false, true, false]);
        assert_eq!(faults.hits(id), 1);
        assert!(faults.remove(id));
    }

    #[test]
    fn latency_adds_to_another_fault() {
        let faults = Faults::default();
        faults.add(FaultRule::always(Matcher::default(), Fault::Latency { millis: 5 }));
        faults.add(FaultRule::always(Matcher::default(), Fault::Timeout));
        let verdict = faults.judge(&call("get", "pods"));
        assert_eq!(verdict.latency, Duration::from_millis(5));
        assert_eq!(verdict.fault, Some(Fault::Timeout));
    }

    #[test]
    fn a_rule_is_read_from_json() {
        let rule: FaultRule = serde_json::from_str(
            r#"{"matches": {"verbs": ["watch"], "resource": "pods"}, "times": 1, "fault": {"type": "watchReset", "afterEvents": 3}}"#,
        )
        .unwrap();
        assert_eq!(rule.fault, Fault::WatchReset { after_events: 3 });
    }
}
