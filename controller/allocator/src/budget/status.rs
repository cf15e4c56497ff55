//! The status of a budget: a pure function of its terms and its account.

use super::account::Account;
use super::amount;
use super::kinds::{Budget, Terms};
use super::profile::{Crossing, Spent};
use super::window::Window;
use crate::api_time::time;
use aliquot_api::v1alpha1::gpu_budget::Enforcement;
use aliquot_model::MicroGpus;
use serde_json::{Value, json};

/// Type of the condition in the status.
pub const CONDITION: &str = "WithinBudget";

/// The state of a budget at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The GPU time spent in the window.
    pub used: Spent,
    /// The GPU time that may be spent in the window.
    pub limit: Spent,
    /// The first second of the window.
    pub start: i64,
    /// The first second after the window; for a rolling window, the present.
    pub end: i64,
    /// The number of claims that are charged now.
    pub claims: usize,
    /// The sum of their parts of GPUs.
    pub rate: MicroGpus,
    /// When the limit is reached if everything that runs goes on; for a calendar window only if that is
    /// within the window.
    pub projected_end: Option<i64>,
    /// When the budget has something left again at the earliest, if it is used up and nothing more is
    /// charged.
    pub frees_at: Option<i64>,
}

impl Standing {
    /// Returns the standing a little later, without new projections; `None` if the projections have to be
    /// computed again.
    pub fn later(&self, terms: &Terms, account: &Account, now: i64) -> Option<Self> {
        let (start, end) = terms.window.bounds(now);
        let used = account.spent(start, now);
        let (claims, rate) = account.running();
        let same = terms.limit == self.limit && (used >= terms.limit) == self.is_over();
        same.then(|| Self { used, start, end, claims, rate, ..self.clone() })
    }

    /// Computes the standing from an account.
    pub fn of(terms: &Terms, account: &Account, now: i64) -> Self {
        let (start, end) = terms.window.bounds(now);
        let (claims, rate) = account.running();
        let used = account.spent(start, now);
        let over = used >= terms.limit;
        let (projected_end, frees_at) = match terms.window {
            Window::Rolling(width) => {
                let profile = account.profile();
                let ahead = |rate, which| profile.crossing(now, width, terms.limit, rate, which);
                (
                    if over { None } else { ahead(rate, Crossing::Reached) },
                    if over { ahead(MicroGpus(0), Crossing::Below) } else { None },
                )
            }
            Window::Day | Window::Week | Window::Month => {
                let left = terms.limit.saturating_sub(used);
                let reached = (!over && rate.0 > 0).then(|| {
                    let seconds = left.saturating_add(Spent::from(rate.0) - 1) / Spent::from(rate.0);
                    now.saturating_add(i64::try_from(seconds).unwrap_or(i64::MAX))
                });
                (reached.filter(|at| *at < end), (over && terms.limit > 0).then_some(end))
            }
        };
        Self { used, limit: terms.limit, start, end, claims, rate, projected_end, frees_at }
    }

    /// Returns true if the budget is used up.
    pub const fn is_over(&self) -> bool {
        self.used >= self.limit
    }
}

/// Returns what happens now, as a text for people.
fn consequence(terms: &Terms) -> String {
    match terms.enforcement {
        Enforcement::Warn => "pods go on as before".to_owned(),
        Enforcement::LowerPriority => {
            format!("new pods get the priority class {}", terms.lower_class.as_deref().unwrap_or_default())
        }
        Enforcement::Refuse => "new pods wait for their devices".to_owned(),
    }
}

/// Returns the sentence for the condition and for events about the budget.
pub fn sentence(terms: &Terms, standing: &Standing) -> String {
    let amounts = format!(
        "{} of {} GPU-hours are used ({})",
        amount::hours(standing.used),
        amount::short(standing.limit),
        terms.window
    );
    if !standing.is_over() {
        return amounts;
    }
    let free = match standing.frees_at {
        Some(at) => format!("; at the earliest at {} there is something left again", time(at)),
        None => String::new(),
    };
    format!("{amounts}; {}{free}", consequence(terms))
}

/// Returns `status` without the account.
pub fn status(budget: &Budget, standing: Option<&Standing>, now: i64) -> Value {
    let (state, holds, reason, message) = match (&budget.terms, standing) {
        (Ok(terms), Some(standing)) if standing.is_over() => {
            ("Over", "False", "UsedUp", sentence(terms, standing))
        }
        (Ok(terms), Some(standing)) => ("Within", "True", "BelowLimit", sentence(terms, standing)),
        (Err(error), _) => ("Invalid", "Unknown", "Invalid", error.to_string()),
        (Ok(_), None) => ("Within", "Unknown", "NotCounted", "nothing is counted yet".to_owned()),
    };
    let before = budget.status.pointer("/conditions/0");
    let kept = before
        .filter(|before| before.get("status").and_then(Value::as_str) == Some(holds))
        .and_then(|before| before.get("lastTransitionTime").cloned());
    let optional = |at: Option<i64>| at.map_or(Value::Null, |at| json!(time(at)));
    let shown = budget.terms.as_ref().ok().zip(standing);
    // The bounds of a rolling window change all the time, so they are not shown.
    let calendar = shown.filter(|(terms, _)| !matches!(terms.window, Window::Rolling(_)));
    json!({
        "observedGeneration": budget.generation,
        "state": state,
        "limit": shown.map(|(terms, _)| amount::short(terms.limit)),
        "used": shown.map(|(_, standing)| amount::hours(standing.used)),
        "remaining": shown.map(|(_, s)| amount::hours(s.limit.saturating_sub(s.used))),
        "window": shown.map(|(terms, _)| terms.window.to_string()),
        "windowStart": optional(calendar.map(|(_, standing)| standing.start)),
        "windowEnd": optional(calendar.map(|(_, standing)| standing.end)),
        "claims": shown.map(|(_, standing)| standing.claims),
        "gpus": shown.map(|(_, standing)| standing.rate.to_string()),
        "projectedEnd": optional(shown.and_then(|(_, standing)| standing.projected_end)),
        "freesAt": optional(shown.and_then(|(_, standing)| standing.frees_at)),
        "conditions": [{
            "type": CONDITION,
            "status": holds,
            "reason": reason,
            "message": message,
            "observedGeneration": budget.generation,
            "lastTransitionTime": kept.unwrap_or_else(|| json!(time(now))),
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_time::second;
    use crate::budget::account::{Allocated, Extent, Sight};

    const NOW: &str = "2026-11-21T12:00:00Z";

    fn terms(hours: &str, window: Window) -> Terms {
        let limit = amount::read(hours).unwrap();
        Terms {
            limit,
            window,
            enforcement: Enforcement::Refuse,
            lower_class: None,
            substitutes: Default::default(),
        }
    }

    /// One claim with half a GPU, allocated so many hours ago.
    fn account(now: i64, hours: i64, runs: bool) -> Account {
        let mut account = Account::new(0);
        let (since, part) = (now - hours * 3600, MicroGpus(500_000));
        let allocated =
            Allocated { since: Some(since), part: Some(part), site: None, most: part, born: since };
        let seen = Sight { allocated: Some(allocated), ..Sight::default() };
        account.observe([("a".into(), seen)], Extent::All, 0, now);
        if !runs {
            account.observe([], Extent::All, 0, now);
        }
        account
    }

    #[test]
    fn a_calendar_budget_ends_with_its_window_and_frees_up_with_the_next() {
        let now = second(NOW).unwrap();
        let standing = Standing::of(&terms("4", Window::Day), &account(now, 2, true), now);
        assert_eq!(amount::hours(standing.used), "1.000");
        // Three hours are left at half a GPU: six hours.
        assert_eq!(standing.projected_end, second("2026-11-21T18:00:00Z"));
        let standing = Standing::of(&terms("8", Window::Day), &account(now, 2, true), now);
        assert_eq!(standing.projected_end, None, "not in this window");
        let standing = Standing::of(&terms("1", Window::Day), &account(now, 2, true), now);
        assert!(standing.is_over());
        assert_eq!(standing.frees_at, second("2026-11-22T00:00:00Z"));
    }

    #[test]
    fn a_rolling_budget_frees_up_when_what_is_old_leaves_it() {
        let now = second(NOW).unwrap();
        let window = Window::Rolling(4 * 3600);
        let standing = Standing::of(&terms("1", window), &account(now, 3, false), now);
        assert_eq!(amount::hours(standing.used), "1.500");
        // In an hour the first half hour of it begins to leave; an hour later it is below 1.
        assert_eq!(standing.frees_at, second("2026-11-21T14:00:01Z"));
        let standing = Standing::of(&terms("2", window), &account(now, 3, true), now);
        assert_eq!(standing.projected_end, second("2026-11-21T13:00:00Z"));
        let standing = Standing::of(&terms("0", window), &account(now, 3, true), now);
        assert_eq!((standing.is_over(), standing.frees_at), (true, None));
    }
}
