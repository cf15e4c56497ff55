//! One budget in the book: its account, where it stands, and when its status is written.

use super::{Action, HEARTBEAT};
use crate::budget::account::{Account, Extent, Stored};
use crate::budget::kinds::{Budget, Substitutes};
use crate::budget::status::{self, Standing};
use crate::budget::window;
use serde_json::{Value, json};

/// What changes of claims may cost of etcd's log, for a budget.
const BYTES_A_SECOND: usize = 32 * 1024;

/// What is stored at once when it changes.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    over: Option<bool>,
    generation: i64,
}

/// Stored forms that are kept, to be told from what others write.
const MOST_OURS: usize = 3;

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) budget: Budget,
    pub(super) account: Account,
    /// What the account is to be told at the next look.
    pub(super) extent: Extent,
    pub(super) standing: Option<Standing>,
    /// When what lies ahead was looked for.
    pub(super) looked_at: i64,
    /// First revision with a change that is not stored.
    pub(super) dirty: Option<u64>,
    /// Last revision with a change.
    pub(super) changed: u64,
    pub(super) writing: Option<u64>,
    /// What we stored, and what is being stored.
    pub(super) ours: Vec<Stored>,
    stored_at: i64,
    /// When the status was found to be what is stored.
    compared_at: i64,
    /// How long nothing but changes of claims is stored after that: what was written is not small.
    pause: i64,
    pub(super) retry_at: i64,
    shown: Value,
    told: Option<Told>,
    /// How many claims the stored status tells of.
    claims: Option<usize>,
    over: bool,
}

impl Entry {
    /// A budget that was not known before.
    pub(super) fn new(budget: Budget, now: i64) -> Self {
        Self {
            account: account_of(&budget, now),
            extent: Extent::All,
            standing: None,
            looked_at: i64::MIN,
            // So that a budget is stored once before anything is acknowledged.
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

    /// The first second that is of interest.
    pub(super) fn counts_from(&self, now: i64) -> i64 {
        let terms = self.budget.terms.as_ref();
        terms.map_or_else(|_| now.saturating_sub(window::LONGEST), |terms| terms.window.bounds(now).0)
    }

    pub(super) fn judge(&mut self, changed: bool, now: i64, actions: &mut Vec<Action>) {
        let Ok(terms) = &self.budget.terms else {
            self.standing = None;
            return;
        };
        // What lies ahead is looked for when something changed, and now and then.
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
        // However often writes fail: of those whose answers were lost it can only be one of the newest.
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
