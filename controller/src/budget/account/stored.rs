//! An account as it is stored in the budget's status: of bounded size, however many claims there are.

use super::sight::Site;
use super::uses::{Charge, MOST_SITES, Marks, Use, Uses};
use super::{Account, MOST_CLAIMS, MOST_STORED_SETTLED};
use crate::budget::profile::MOST_POINTS;
use aliquot_model::usage::MicroGpus;
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display, Write};
use std::str::FromStr;
use std::sync::Arc;

/// UIDs that are longer, or of other characters than those of UUIDs, are not stored.
const LONGEST_UID: usize = 64;
/// A stored use at most: the UID, four seconds, a part, whether it goes on, and what is between them.
const USE_BYTES: usize = LONGEST_UID + 5 * 20 + 1 + 7;
/// The nodes of a stored use at most, and what is between them.
const SITES_BYTES: usize = MOST_SITES * (16 + 1);
/// A change of what is charged at most: two numbers and what is between them.
const POINT_BYTES: usize = 2 * 20 + 2;
/// What a stored account takes at most, in bytes of JSON. Of etcd's 1.5 MiB this leaves the rest to whoever else
/// writes into the object. Typical are 90 bytes a use and 12 a change.
pub const MOST_BYTES: usize =
    (MOST_CLAIMS + MOST_STORED_SETTLED) * (USE_BYTES + SITES_BYTES) + (MOST_POINTS + 1) * POINT_BYTES + 256;

/// An account as it is stored in the budget's status.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    begun: i64,
    seen: i64,
    /// What began before and is not in `claims` is charged until then.
    #[serde(default)]
    watermark: Option<i64>,
    /// Everything that is charged until `seen`, as [`crate::budget::profile::Profile`] writes it.
    #[serde(default)]
    pub(super) charged: String,
    /// Uses that are kept one by one: see [`Word`].
    #[serde(default)]
    pub(super) claims: String,
    /// Of which nodes these have devices.
    #[serde(default)]
    pub(super) sites: Sites,
    /// As accounts were stored before: uses, and what is charged besides them. Written as null, as what a merge
    /// patch does not name stays.
    #[serde(default)]
    uses: Option<Vec<Former>>,
    #[serde(default)]
    history: Option<String>,
}

impl Stored {
    /// Bytes of text in it.
    pub fn len(&self) -> usize {
        self.charged.len().saturating_add(self.claims.len()).saturating_add(self.sites.text.len())
    }

    /// Whether nothing is charged and no claim known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Of which nodes the claims of stored uses were given devices. Controllers that do not know of it leave it as it is:
/// then it is of another moment, and says nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Sites {
    /// The last second that was counted when it was written.
    seen: i64,
    /// For each use, in their order, its nodes or `-`.
    pub(super) text: String,
}

/// A use as it was stored before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Former {
    uid: String,
    since: i64,
    claimed: i64,
    #[serde(default)]
    held: Option<i64>,
    #[serde(default)]
    released: Option<i64>,
    #[serde(default)]
    micro_gpus: Option<MicroGpus>,
    open: bool,
}

/// `<uid>:<since>:<claimed>:<held>:<released>:<millionths of a GPU>:<1 if it goes on>`; what is not known is empty.
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

/// Words, one by one, as of a look.
struct Claims {
    text: String,
    sites: String,
    at: i64,
}

impl Claims {
    fn push(&mut self, uid: &str, known: &Use, sites: &[Site]) {
        let space = if self.text.is_empty() { "" } else { " " };
        // A String takes whatever is written to it.
        let _ = write!(self.text, "{space}{}", Word(uid, known.at(self.at)));
        self.sites.push_str(space);
        let [first, others @ ..] = sites else { return self.sites.push('-') };
        let _ = write!(self.sites, "{first}");
        for site in others {
            let _ = write!(self.sites, ",{site}");
        }
    }
}

/// Reads a [`Word`].
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
    /// As it was stored; `None` if that cannot be read.
    pub fn restore(stored: &Stored) -> Option<Self> {
        let mut account = Self::new(stored.begun);
        account.seen = stored.seen;
        account.watermark = stored.watermark.unwrap_or(i64::MIN);
        let former = stored.uses.as_deref().unwrap_or_default();
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
        for Former { uid, since, claimed, held, released, micro_gpus, open } in former {
            let known = Use::restored((*since, *claimed), (*held, *released), *micro_gpus, *open);
            account.uses.entry(uid.as_str().into()).or_default().push(known);
        }
        let known: Vec<(Arc<str>, Marks)> =
            account.uses.iter().map(|(uid, uses)| (uid.clone(), uses.marks())).collect();
        for (uid, marks) in known {
            account.mark(&uid, &Marks::default(), &marks);
        }
        if !former.is_empty() {
            // What they are charged was not in the history.
            let charges: Vec<Charge> = account.uses.values().flat_map(Uses::charges).collect();
            account.charge(&charges, true);
        }
        Some(account)
    }

    /// To be stored: at most [`super::MOST_CLAIMS`] uses by themselves, and at most [`MOST_BYTES`]. What is left
    /// out is charged until now, which is the watermark then. Settled uses have a room of their own: what is left
    /// out of them was charged, and only a view that lags would show it.
    pub fn store(&self) -> Stored {
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
        Stored {
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
