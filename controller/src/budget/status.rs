//! What a budget's status says: a pure function of terms and account.

use super::account::Account;
use super::amount;
use super::kinds::{Budget, Enforcement, Terms};
use super::profile::{Crossing, Spent};
use super::window::{Window, time};
use aliquot_model::usage::MicroGpus;
use serde_json::{Value, json};

/// Type of the condition.
pub const CONDITION: &str = "WithinBudget";

/// How a budget stands at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// What was spent in the window.
    pub used: Spent,
    /// What may be.
    pub limit: Spent,
    /// First second of the window.
    pub start: i64,
    /// First second after it; of a rolling one the present.
    pub end: i64,
    /// Claims that are charged now.
    pub claims: usize,
    /// Their part of GPUs.
    pub rate: MicroGpus,
    /// When the limit is reached if what runs goes on; only within the window.
    pub projected_end: Option<i64>,
    /// When there is something left again at the earliest, if it is used up: if nothing more is charged.
    pub frees_at: Option<i64>,
}

impl Standing {
    /// The same a little later: what lies ahead is not looked for anew. `None` if it has to be.
    pub fn later(&self, terms: &Terms, account: &Account, now: i64) -> Option<Self> {
        let (start, end) = terms.window.bounds(now);
        let used = account.spent(start, now);
        let (claims, rate) = account.running();
        let same = terms.limit == self.limit && (used >= terms.limit) == self.is_over();
        same.then(|| Self { used, start, end, claims, rate, ..self.clone() })
    }

    /// Looks at an account.
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

    /// Whether it is used up.
    pub const fn is_over(&self) -> bool {
        self.used >= self.limit
    }
}

/// What happens now, for people.
fn consequence(terms: &Terms) -> String {
    match terms.enforcement {
        Enforcement::Warn => "pods go on as before".to_owned(),
        Enforcement::LowerPriority => {
            format!("new pods get the priority class {}", terms.lower_class.as_deref().unwrap_or_default())
        }
        Enforcement::Refuse => "new pods wait for their devices".to_owned(),
    }
}

/// The sentence of the condition and of events about the budget.
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

/// `status` without the account.
pub fn status(budget: &Budget, standing: Option<&Standing>, now: i64) -> Value {
    let (state, holds, reason, message) = match (&budget.terms, standing) {
        (Ok(terms), Some(standing)) if standing.is_over() => {
            ("Over", "False", "UsedUp", sentence(terms, standing))
        }
        (Ok(terms), Some(standing)) => ("Within", "True", "BelowLimit", sentence(terms, standing)),
        (Err(error), _) => ("Invalid", "Unknown", "Invalid", error.clone()),
        (Ok(_), None) => ("Within", "Unknown", "NotCounted", "nothing is counted yet".to_owned()),
    };
    let before = budget.status.pointer("/conditions/0");
    let kept = before
        .filter(|before| before.get("status").and_then(Value::as_str) == Some(holds))
        .and_then(|before| before.get("lastTransitionTime").cloned());
    let optional = |at: Option<i64>| at.map_or(Value::Null, |at| json!(time(at)));
    let shown = budget.terms.as_ref().ok().zip(standing);
    // A rolling window begins and ends all the time.
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
    use crate::budget::account::{Allocated, Extent, Sight};
    use crate::budget::window::second;

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
