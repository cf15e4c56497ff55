//! The stored form of an account, in the budget's status: of bounded size, however many claims there are.

use super::sight::Site;
use super::uses::{Charge, MOST_SITES, Marks, Use, Uses};
use super::{Account, MOST_CLAIMS, MOST_STORED_SETTLED};
use crate::budget::profile::MOST_POINTS;
use aliquot_api::v1alpha1::gpu_budget::{self, EarlierUse, Sites};
use aliquot_model::MicroGpus;
use std::fmt::{self, Display, Write};
use std::str::FromStr;
use std::sync::Arc;

/// The longest UID that is stored, in bytes. UIDs that are longer, or have other characters than UUIDs, are
/// not stored.
const LONGEST_UID: usize = 64;
/// The most bytes of a stored use: the UID, four seconds, a part, whether the use goes on, and separators.
const USE_BYTES: usize = LONGEST_UID + 5 * 20 + 1 + 7;
/// The most bytes of the nodes of a stored use, with separators.
const SITES_BYTES: usize = MOST_SITES * (16 + 1);
/// The most bytes of a change of the profile: two numbers and separators.
const POINT_BYTES: usize = 2 * 20 + 2;
/// The most bytes of JSON that a stored account takes. This leaves the rest of etcd's 1.5 MiB to other
/// writers of the object. Typical are 90 bytes for each use and 12 for each change.
pub const MOST_BYTES: usize =
    (MOST_CLAIMS + MOST_STORED_SETTLED) * (USE_BYTES + SITES_BYTES) + (MOST_POINTS + 1) * POINT_BYTES + 256;

/// A stored use: `<uid>:<since>:<claimed>:<held>:<released>:<millionths of a GPU>:<1 if it goes on>`. A field
/// that is not known is empty.
struct Word<'a>(&'a str, Use);

impl Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(uid, Use { since, claimed, held, released, part, open, .. }) = self;
        write!(f, "{uid}:{since}:{claimed}:")?;
        for told in [held, released] {
            if let Some(told) = told {
                write!(f, "{told}")?;
            }
            f.write_char(':')?;
        }
        if let Some(part) = part {
            write!(f, "{}", part.0)?;
        }
        write!(f, ":{}", u8::from(*open))
    }
}

/// Collects the stored uses and their nodes, as of the look `at`.
struct Claims {
    text: String,
    sites: String,
    at: i64,
}

impl Claims {
    fn push(&mut self, uid: &str, known: &Use, sites: &[Site]) {
        let space = if self.text.is_empty() { "" } else { " " };
        // Writing to a String cannot fail.
        let _ = write!(self.text, "{space}{}", Word(uid, known.at(self.at)));
        self.sites.push_str(space);
        let [first, others @ ..] = sites else { return self.sites.push('-') };
        let _ = write!(self.sites, "{first}");
        for site in others {
            let _ = write!(self.sites, ",{site}");
        }
    }
}

/// Reads a [`Word`]; `None` if it is malformed.
fn read(word: &str) -> Option<(Arc<str>, Use)> {
    fn optional<T: FromStr>(text: &str) -> Option<Option<T>> {
        if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
    }
    let mut fields = word.split(':');
    let uid = fields.next()?;
    let (since, claimed) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    let told = (optional(fields.next()?)?, optional(fields.next()?)?);
    let part = optional(fields.next()?)?.map(MicroGpus);
    let open = fields.next()? == "1";
    fields.next().is_none().then(|| (uid.into(), Use::restored((since, claimed), told, part, open)))
}

fn is_plain(uid: &str) -> bool {
    uid.len() <= LONGEST_UID && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

impl Account {
    /// Restores an account from its stored form; `None` if that cannot be read.
    pub fn restore(stored: &gpu_budget::Account) -> Option<Self> {
        let mut account = Self::new(stored.begun);
        account.seen = stored.seen;
        account.watermark = stored.watermark.unwrap_or(i64::MIN);
        let earlier = stored.uses.as_deref().unwrap_or_default();
        account.charged = stored.history.as_ref().unwrap_or(&stored.charged).parse().ok()?;
        let sites = Some(&stored.sites).filter(|sites| sites.seen == stored.seen);
        let mut sites = sites.map_or("", |sites| &sites.text).split_whitespace();
        for word in stored.claims.split_whitespace() {
            let (uid, known) = read(word)?;
            let uses = account.uses.entry(uid).or_default();
            uses.push(known);
            let sites = sites.next().unwrap_or_default().split(',').filter_map(|site| site.parse().ok());
            sites.for_each(|site| uses.was_at(site));
        }
        for EarlierUse { uid, since, claimed, held, released, micro_gpus, open } in earlier {
            let known = Use::restored((*since, *claimed), (*held, *released), *micro_gpus, *open);
            account.uses.entry(uid.as_str().into()).or_default().push(known);
        }
        let known: Vec<(Arc<str>, Marks)> =
            account.uses.iter().map(|(uid, uses)| (uid.clone(), uses.marks())).collect();
        for (uid, marks) in known {
            account.mark(&uid, &Marks::default(), &marks);
        }
        if !earlier.is_empty() {
            // The earlier form did not have the charges of uses in its history.
            let charges: Vec<Charge> = account.uses.values().flat_map(Uses::charges).collect();
            account.charge(&charges, true);
        }
        Some(account)
    }

    /// Returns the stored form: at most [`super::MOST_CLAIMS`] uses individually, and at most [`MOST_BYTES`].
    /// A use that is left out is charged until now, and now becomes the watermark. Settled uses have their
    /// own limit: those that are left out have been charged, and only a view that lags would show them.
    pub fn store(&self) -> gpu_budget::Account {
        let mut room = self.most;
        let mut left_out = false;
        let mut claims = Claims { text: String::new(), sites: String::new(), at: self.seen };
        let others = self.uses.keys().filter(|uid| !self.delicate.contains(*uid));
        for uid in self.delicate.iter().chain(others) {
            let Some(uses) = self.uses.get(uid) else { continue };
            let list: Vec<&Use> = uses.list().iter().filter(|u| !uses.is_over(u)).collect();
            if list.is_empty() {
                continue;
            }
            if list.len() > room || !is_plain(uid) {
                left_out = true;
                if room == 0 {
                    break;
                }
                continue;
            }
            room = room.saturating_sub(list.len());
            list.into_iter().for_each(|known| claims.push(uid, known, uses.sites()));
        }
        for (end, uid) in self.settled.iter().rev().filter(|(_, uid)| is_plain(uid)).take(MOST_STORED_SETTLED)
        {
            let Some(uses) = self.uses.get(uid) else { continue };
            let known = uses.list().iter().find(|u| uses.is_over(u) && u.end(u.since) == *end);
            known.into_iter().for_each(|known| claims.push(uid, known, uses.sites()));
        }
        let watermark = if left_out { self.seen } else { self.watermark };
        gpu_budget::Account {
            begun: self.begun,
            seen: self.seen,
            watermark: Some(watermark).filter(|at| *at > i64::MIN),
            charged: self.charged.ended(self.seen).to_string(),
            claims: claims.text,
            sites: Sites { seen: self.seen, text: claims.sites },
            uses: None,
            history: None,
        }
    }
}
