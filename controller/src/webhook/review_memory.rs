//! A bound on the memory of all reviews together, from the first byte of a body to the answer.
//!
//! Whoever reaches the port can send reviews, many at a time, and text becomes much more when it is read: two bytes
//! can be an object of its own. So reviews are charged for what they can become, before they are read. What is beyond
//! the bound is not read; its answer is that it was not checked.

use super::evaluators::Unchecked;
use super::review::{self, App};
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use parking_lot::Mutex;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// A body, in bytes: a review has an object twice, and etcd takes 1.5 MiB.
pub(super) const BODY: usize = 4 << 20;
/// What all reviews are charged for at most, those of one peer, and one review, in bytes. Evaluations that go on after
/// their review was answered hold four reviews more at most.
const ALL: usize = 128 << 20;
const OF_ONE_PEER: usize = ALL / 2;
const ONE: usize = 16 << 20;
/// What a byte of text is charged for: the body and the buffer that it is read into, strings, and copies of them.
const BYTE: usize = 4;
/// What an object, and an element of a list or an object, can take once they are read: a map's node, and what the API's
/// structs are besides: a Container is the largest, with 2.1 KiB.
const OBJECT: usize = 4096;
const ELEMENT: usize = 256;
/// What is looked at of a review that is not read: the API server writes its UID first.
const HEAD: usize = 4096;

/// Who sent a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) IpAddr);

/// How much memory reviews may take. Clones are the same one.
#[derive(Debug, Clone)]
pub(super) struct ReviewMemory {
    all: usize,
    of_one_peer: usize,
    used: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self::of(ALL, OF_ONE_PEER)
    }
}

impl ReviewMemory {
    /// So much for all, and for each peer of it.
    pub(super) fn of(all: usize, of_one_peer: usize) -> Self {
        Self { all, of_one_peer, used: Arc::default() }
    }

    /// What reviews are charged for now.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.lock().values().sum()
    }

    fn charge(&self, peer: IpAddr) -> Charge {
        Charge { memory: self.clone(), peer, bytes: 0 }
    }
}

/// What one review is charged for, as long as it lives.
#[derive(Debug)]
struct Charge {
    memory: ReviewMemory,
    peer: IpAddr,
    bytes: usize,
}

impl Charge {
    /// Charges for more text.
    fn add(&mut self, text: &[u8]) -> Result<(), Unchecked> {
        let bytes = weight(text);
        if self.bytes + bytes > ONE {
            return Err(Unchecked::TooLarge);
        }
        let mut used = self.memory.used.lock();
        let all: usize = used.values().sum();
        let own = used.get(&self.peer).copied().unwrap_or_default();
        if all + bytes > self.memory.all || own + bytes > self.memory.of_one_peer {
            return Err(Unchecked::OutOfMemory);
        }
        used.insert(self.peer, own + bytes);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut used = self.memory.used.lock();
        if let Some(own) = used.get_mut(&self.peer) {
            *own -= self.bytes;
            if *own == 0 {
                used.remove(&self.peer);
            }
        }
    }
}

/// What JSON can take in memory, told without reading it. What stands in strings counts as if it did not.
pub(super) fn weight(text: &[u8]) -> usize {
    let of = |byte: &u8| match byte {
        b'{' => OBJECT,
        b'[' | b',' => ELEMENT,
        _ => BYTE,
    };
    text.iter().map(of).sum()
}

/// Reads a review's body as far as there is memory for it, and has it answered; what is too much is let go by.
pub(super) async fn within(
    State((app, memory)): State<(App, ReviewMemory)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(Peer(peer)) = request.extensions().get().copied() else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let (head, body) = request.into_parts();
    let mut charge = Some(memory.charge(peer));
    let mut refused = None;
    let (mut text, mut length) = (Vec::new(), 0);
    let mut parts = body.into_data_stream();
    while let Some(part) = parts.next().await {
        let Ok(part) = part else { return StatusCode::BAD_REQUEST.into_response() };
        length += part.len();
        if length > BODY {
            return StatusCode::PAYLOAD_TOO_LARGE.into_response();
        }
        match charge.as_mut().map(|charge| charge.add(&part)) {
            Some(Ok(())) => text.extend_from_slice(&part),
            Some(Err(why)) => {
                (charge, refused) = (None, Some(why));
                text = begin(&text, &part);
            }
            None if text.len() < HEAD => text = begin(&text, &part),
            None => {}
        }
    }
    if let Some(why) = refused {
        return match uid(&text) {
            Some(uid) => review::not_read(&app, head.uri.path(), &uid, why).into_response(),
            // The API server does as the webhook's failure policy says.
            None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        };
    }
    let answer = next.run(Request::from_parts(head, Body::from(Bytes::from(text)))).await;
    drop(charge);
    answer
}

/// The beginning of what two pieces of text are together.
fn begin(text: &[u8], more: &[u8]) -> Vec<u8> {
    text.iter().chain(more).take(HEAD).copied().collect()
}

/// The review's UID, if it stands in the beginning of its text.
fn uid(head: &[u8]) -> Option<String> {
    let mut found = None;
    let mut text = serde_json::Deserializer::from_slice(head);
    // The text is cut off, so an error says nothing.
    let _ = At { path: &["request", "uid"], found: &mut found }.deserialize(&mut text);
    found
}

/// The string at a path of an object; reads no further than that.
struct At<'f> {
    path: &'static [&'static str],
    found: &'f mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for At<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, text: D) -> Result<(), D::Error> {
        if self.path.is_empty() {
            *self.found = Some(serde::Deserialize::deserialize(text)?);
            return Ok(());
        }
        text.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for At<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let Some((first, path)) = self.path.split_first() else { return Ok(()) };
        while let Some(key) = entries.next_key::<String>()? {
            if key == *first {
                entries.next_value_seed(At { path, found: self.found })?;
                return Err(A::Error::custom("found"));
            }
            entries.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const GOOD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn one_peer_has_its_part_of_the_memory_and_gets_it_back() {
        let memory = ReviewMemory::of(100 * BYTE, 60 * BYTE);
        let mut held = memory.charge(BAD);
        assert_eq!(held.add(&[b' '; 50]), Ok(()));
        assert_eq!(memory.charge(BAD).add(&[b' '; 11]), Err(Unchecked::OutOfMemory));
        assert_eq!(memory.charge(GOOD).add(&[b' '; 50]), Ok(()));
        assert_eq!(memory.charge(GOOD).add(&[b' '; 51]), Err(Unchecked::OutOfMemory));
        drop(held);
        assert_eq!(memory.charge(BAD).add(&[b' '; 60]), Ok(()));
        assert!(memory.used.lock().is_empty());
    }

    #[test]
    fn text_that_becomes_much_is_charged_for_what_it_becomes() {
        let mut charge = ReviewMemory::default().charge(BAD);
        assert_eq!(charge.add("{},".repeat(ONE / 8192).as_bytes()), Ok(()));
        assert_eq!(charge.add("{},".repeat(ONE / 8192).as_bytes()), Err(Unchecked::TooLarge));
    }

    #[rstest::rstest]
    #[case::whole(r#"{"kind":"AdmissionReview","request":{"uid":"u","object":{}}}"#, Some("u"))]
    #[case::cut_off(r#"{"kind":"AdmissionReview","request":{"uid":"u","object":{"a"#, Some("u"))]
    #[case::cut_off_before(r#"{"kind":"AdmissionReview","request":{"ui"#, None)]
    #[case::another_one(r#"{"uid":"no","request":{"object":{"uid":"no"}}}"#, None)]
    #[case::no_text(r#"{"request":{"uid":7}}"#, None)]
    fn the_uid_is_found_in_the_beginning(#[case] head: &str, #[case] expected: Option<&str>) {
        assert_eq!(uid(head.as_bytes()).as_deref(), expected);
    }
}
