//! One budget in the book: its account, its standing, and when its status is written.

use super::{Action, HEARTBEAT};
use crate::budget::account::{Account, Extent};
use crate::budget::kinds::Budget;
use crate::budget::status::{self, Standing};
use crate::budget::window;
use aliquot_api::v1alpha1::gpu_budget;
use aliquot_api::v1alpha1::gpu_budget::Substitutes;
use serde_json::{Value, json};

/// The bytes per second that changes of claims may add to etcd's log, for each budget.
const BYTES_A_SECOND: usize = 32 * 1024;

/// The facts whose changes are stored at once.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    over: Option<bool>,
    generation: i64,
}

/// The number of own stored forms that are remembered, to recognize what others write.
const MOST_OURS: usize = 3;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) budget: Budget,
    pub(super) account: Account,
    /// The claims that the next look has to cover.
    pub(super) extent: Extent,
    pub(super) standing: Option<Standing>,
    /// When the projections were last computed.
    pub(super) looked_at: i64,
    /// The first revision with a change that is not stored.
    pub(super) dirty: Option<u64>,
    /// The last revision with a change.
    pub(super) changed: u64,
    pub(super) writing: Option<u64>,
    /// The stored forms that the controller wrote or is writing.
    pub(super) ours: Vec<gpu_budget::Account>,
    stored_at: i64,
    /// When the status was last found to be equal to the stored one.
    compared_at: i64,
    /// How long after a write changes of claims alone are not stored, in seconds; it grows with the size of
    /// the last write.
    pause: i64,
    pub(super) retry_at: i64,
    shown: Value,
    told: Option<Told>,
    /// The number of claims in the stored status.
    claims: Option<usize>,
    over: bool,
}

impl Entry {
    /// Creates the entry of a budget that was not known before.
    pub(super) fn new(budget: Budget, now: i64) -> Self {
        Self {
            account: account_of(&budget, now),
            extent: Extent::All,
            standing: None,
            looked_at: i64::MIN,
            // A budget is stored once before anything is acknowledged.
            dirty: Some(0),
            changed: 0,
            writing: None,
            ours: Vec::new(),
            stored_at: i64::MIN,
            compared_at: i64::MIN,
            pause: 0,
            retry_at: i64::MIN,
            shown: Value::Null,
            told: None,
            claims: None,
            over: budget.is_over(),
            budget,
        }
    }

    pub(super) fn substitutes(&self) -> Substitutes {
        self.budget.substitutes()
    }

    /// Returns the first second that is of interest.
    pub(super) fn counts_from(&self, now: i64) -> i64 {
        let terms = self.budget.terms.as_ref();
        terms.map_or_else(|_| now.saturating_sub(window::LONGEST), |terms| terms.window.bounds(now).0)
    }

    pub(super) fn judge(&mut self, changed: bool, now: i64, actions: &mut Vec<Action>) {
        let Ok(terms) = &self.budget.terms else {
            self.standing = None;
            return;
        };
        // Projections are computed when something has changed, and from time to time.
        let fresh = !changed && now.saturating_sub(self.looked_at) < HEARTBEAT;
        let before = self.standing.as_ref().filter(|_| fresh);
        let standing = match before.and_then(|before| before.later(terms, &self.account, now)) {
            Some(standing) => standing,
            None => {
                self.looked_at = now;
                Standing::of(terms, &self.account, now)
            }
        };
        let over = standing.is_over();
        if over != self.over {
            self.over = over;
            actions.push(Action::Tell {
                key: self.budget.key.clone(),
                uid: self.budget.uid.clone(),
                over,
                note: status::sentence(terms, &standing),
            });
        }
        self.standing = Some(standing);
    }

    pub(super) fn store(&mut self, revision: u64, now: i64, actions: &mut Vec<Action>) {
        if self.writing.is_some() || now < self.retry_at {
            return;
        }
        let told =
            Told { over: self.standing.as_ref().map(Standing::is_over), generation: self.budget.generation };
        let claims = self.standing.as_ref().map(|standing| standing.claims);
        let since = now.saturating_sub(self.stored_at);
        let news = self.dirty.is_some() || self.claims != claims;
        let is_urgent = self.told.as_ref() != Some(&told);
        let is_due = since.min(now.saturating_sub(self.compared_at)) >= HEARTBEAT;
        if !(is_urgent || news && since >= self.pause || is_due) {
            return;
        }
        let mut status = status::status(&self.budget, self.standing.as_ref(), now);
        if !(is_urgent || news || self.account.running().0 > 0 || status != self.shown) {
            self.compared_at = now;
            return;
        }
        self.shown = status.clone();
        self.told = Some(told);
        self.claims = claims;
        let stored = self.account.store();
        self.pause = i64::try_from(stored.len() / BYTES_A_SECOND).unwrap_or(HEARTBEAT).min(HEARTBEAT);
        if let Some(fields) = status.as_object_mut() {
            fields.insert("account".to_owned(), json!(stored));
        }
        // This suffices however often writes fail: of the writes whose answers were lost, only one of the
        // newest can have succeeded.
        if self.ours.len() >= MOST_OURS {
            self.ours.remove(0);
        }
        self.ours.push(stored);
        self.writing = Some(revision);
        self.stored_at = now;
        actions.push(Action::Store {
            key: self.budget.key.clone(),
            uid: self.budget.uid.clone(),
            version: self.budget.version.clone(),
            status,
            revision,
        });
    }
}

pub(super) fn account_of(budget: &Budget, now: i64) -> Account {
    match &budget.stored {
        None => Account::new(now),
        Some(stored) => Account::restore(stored).unwrap_or_else(|| {
            tracing::error!(budget = %budget.key, "its account cannot be read: it begins anew");
            Account::new(now)
        }),
    }
}
