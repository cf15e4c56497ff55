//! A bound on the memory of all reviews together, from the first byte of a body to the answer.
//!
//! Whoever reaches the port can send reviews, many at a time, and text becomes much more when it is read: two bytes
//! can be an object of its own. So reviews are charged for what they can become, before they are read. What is beyond
//! the bound is not read; its answer is that it was not checked.
//!
//! A body is charged for its bytes while it comes in, and for what it can become once it is whole and says for which
//! namespace it is. A peer has at most half of what the others leave, and a namespace an eighth of all: whoever writes
//! reviews, or makes the API server send some, leaves room for the others'.

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
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// A body, in bytes: a review has an object twice, and etcd takes 1.5 MiB.
pub(super) const BODY: usize = 4 << 20;
/// What all reviews are charged for at most, and those of one namespace, or one, in bytes. Evaluations that go on after
/// their review was answered hold four reviews more at most.
const ALL: usize = 128 << 20;
const ONE: usize = ALL / 8;
/// How long a body may take to come in: the API server itself waits no longer than `timeoutSeconds`, 5 s in the chart.
const WITHIN: Duration = Duration::from_secs(5);
/// What a byte of a body is charged for while it comes in: the buffer may be twice as large.
const BUFFERED: usize = 2;
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
    used: Arc<Mutex<Used>>,
}

/// What reviews are charged for, by who sent them and for which namespace they are.
#[derive(Debug, Default)]
struct Used {
    peers: HashMap<IpAddr, usize>,
    namespaces: HashMap<String, usize>,
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self::of(ALL)
    }
}

impl ReviewMemory {
    /// So much for all.
    pub(super) fn of(all: usize) -> Self {
        Self { all, used: Arc::default() }
    }

    /// What reviews are charged for now.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.lock().peers.values().sum()
    }

    fn charge(&self, peer: IpAddr) -> Charge {
        Charge { memory: self.clone(), peer, namespace: None, bytes: 0 }
    }
}

/// What one review is charged for, as long as it lives.
#[derive(Debug)]
struct Charge {
    memory: ReviewMemory,
    peer: IpAddr,
    namespace: Option<String>,
    bytes: usize,
}

impl Charge {
    /// Charges so much in all from now on.
    fn be(&mut self, bytes: usize) -> Result<(), Unchecked> {
        if bytes > ONE {
            return Err(Unchecked::TooLarge);
        }
        let mut used = self.memory.used.lock();
        let others = used.peers.iter().filter(|(peer, _)| **peer != self.peer).map(|(_, used)| used).sum();
        let own = used.peers.get(&self.peer).copied().unwrap_or_default() - self.bytes + bytes;
        if own > self.memory.all.saturating_sub(others) / 2 {
            return Err(Unchecked::OutOfMemory);
        }
        used.peers.insert(self.peer, own);
        self.bytes = bytes;
        Ok(())
    }

    /// Charges for a whole body.
    fn read(&mut self, text: &[u8]) -> Result<(), Unchecked> {
        let bytes = weight(text);
        self.be(bytes)?;
        // What is of no namespace has a part of its own.
        let namespace = string(text, &["request", "namespace"]).unwrap_or_default();
        let mut used = self.memory.used.lock();
        let part = used.namespaces.get(&namespace).copied().unwrap_or_default() + bytes;
        if part > self.memory.all / 8 {
            return Err(Unchecked::OutOfMemory);
        }
        used.namespaces.insert(namespace.clone(), part);
        self.namespace = Some(namespace);
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut used = self.memory.used.lock();
        let Used { peers, namespaces } = &mut *used;
        give_back(peers, &self.peer, self.bytes);
        if let Some(namespace) = &self.namespace {
            give_back(namespaces, namespace, self.bytes);
        }
    }
}

fn give_back<K: Hash + Eq>(used: &mut HashMap<K, usize>, of: &K, bytes: usize) {
    if let Some(own) = used.get_mut(of) {
        *own -= bytes;
        if *own == 0 {
            used.remove(of);
        }
    }
}

/// What JSON can take in memory, told without reading it: by its brackets and commas outside of strings.
pub(super) fn weight(text: &[u8]) -> usize {
    let (mut in_string, mut is_escaped, mut all) = (false, false, 0);
    for byte in text {
        all += match byte {
            b'{' if !in_string => OBJECT,
            b'[' | b',' if !in_string => ELEMENT,
            _ => BYTE,
        };
        match byte {
            b'"' if !is_escaped => in_string = !in_string,
            b'\\' if in_string && !is_escaped => {
                is_escaped = true;
                continue;
            }
            _ => {}
        }
        is_escaped = false;
    }
    all
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
    let mut charge = memory.charge(peer);
    let taken = match tokio::time::timeout(WITHIN, take_in(body, &mut charge)).await {
        Ok(Ok(taken)) => taken,
        Ok(Err(status)) => return status.into_response(),
        Err(_) => return StatusCode::REQUEST_TIMEOUT.into_response(),
    };
    let (text, refused) = match taken {
        (text, Ok(())) => {
            let read = charge.read(&text);
            (text, read.err())
        }
        (text, Err(why)) => (text, Some(why)),
    };
    if let Some(why) = refused {
        drop(charge);
        return match string(text.get(..HEAD).unwrap_or(&text), &["request", "uid"]) {
            Some(uid) => review::not_read(&app, head.uri.path(), &uid, why).into_response(),
            // The API server does as the webhook's failure policy says.
            None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        };
    }
    let answer = next.run(Request::from_parts(head, Body::from(Bytes::from(text)))).await;
    drop(charge);
    answer
}

/// The whole of a body; or its beginning, and why the rest was let go by.
async fn take_in(body: Body, charge: &mut Charge) -> Result<(Vec<u8>, Result<(), Unchecked>), StatusCode> {
    let (mut text, mut length, mut taken) = (Vec::new(), 0, Ok(()));
    let mut parts = body.into_data_stream();
    while let Some(part) = parts.next().await {
        let Ok(part) = part else { return Err(StatusCode::BAD_REQUEST) };
        length += part.len();
        if length > BODY {
            return Err(StatusCode::PAYLOAD_TOO_LARGE);
        }
        if taken.is_ok() {
            taken = charge.be(length * BUFFERED);
        }
        if taken.is_ok() {
            text.extend_from_slice(&part);
        } else if text.len() < HEAD || text.capacity() > HEAD {
            text = begin(&text, &part);
            let _ = charge.be(0);
        }
    }
    Ok((text, taken))
}

/// The beginning of what two pieces of text are together.
fn begin(text: &[u8], more: &[u8]) -> Vec<u8> {
    text.iter().chain(more).take(HEAD).copied().collect()
}

/// A string of the review, if it stands in this text.
fn string(text: &[u8], path: &'static [&'static str]) -> Option<String> {
    let mut found = None;
    let mut text = serde_json::Deserializer::from_slice(text);
    // The text may be cut off, so an error says nothing.
    let _ = At { path, found: &mut found }.deserialize(&mut text);
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

    fn review(namespace: &str, more: &str) -> Vec<u8> {
        format!(r#"{{"request":{{"uid":"u","namespace":"{namespace}","object":{more}}}}}"#).into_bytes()
    }

    #[test]
    fn a_peer_has_half_of_what_the_others_leave_and_gets_it_back() {
        let memory = ReviewMemory::of(96);
        let (mut bad, mut good) = (memory.charge(BAD), memory.charge(GOOD));
        assert_eq!(bad.be(49), Err(Unchecked::OutOfMemory));
        assert_eq!(bad.be(48), Ok(()));
        assert_eq!(memory.charge(BAD).be(1), Err(Unchecked::OutOfMemory));
        assert_eq!((good.be(25), good.be(24)), (Err(Unchecked::OutOfMemory), Ok(())));
        assert_eq!(bad.be(36), Ok(()), "what is given back is there again");
        assert_eq!(memory.used(), 60);
        drop((bad, good));
        assert!(memory.used.lock().peers.is_empty());
    }

    #[test]
    fn half_sent_bodies_of_a_few_kib_leave_room_for_the_api_server_whatever_they_say() {
        let memory = ReviewMemory::default();
        let mut held = Vec::new();
        for pod in 1..100 {
            for _ in 0..128 {
                let mut charge = memory.charge(IpAddr::from([10, 1, 0, pod]));
                let _ = charge.be(4096 * BUFFERED);
                held.push(charge);
            }
        }
        assert_eq!(memory.charge(GOOD).read(&review("good", "{}")), Ok(()));
    }

    #[test]
    fn one_namespace_leaves_room_for_those_whose_reviews_come_from_the_same_api_server() {
        let memory = ReviewMemory::default();
        let object = format!("[{}]", "{},".repeat(300));
        let (mut held, mut refused) = (Vec::new(), 0);
        for _ in 0..100 {
            let mut charge = memory.charge(GOOD);
            match charge.read(&review("bad", &object)) {
                Ok(()) => held.push(charge),
                Err(why) => {
                    assert_eq!(why, Unchecked::OutOfMemory);
                    refused += 1;
                }
            }
        }
        assert!(refused > 0 && memory.used() <= ONE, "{}", memory.used());
        assert_eq!(memory.charge(GOOD).read(&review("good", &object)), Ok(()));
        drop(held);
        assert_eq!(memory.charge(GOOD).read(&review("bad", &object)), Ok(()));
        assert!(memory.used.lock().namespaces.is_empty());
    }

    #[test]
    fn text_that_becomes_much_is_charged_for_what_it_becomes() {
        let mut charge = ReviewMemory::default().charge(BAD);
        assert_eq!(charge.read("{},".repeat(ONE / 8192).as_bytes()), Ok(()));
        drop(charge);
        let mut charge = ReviewMemory::default().charge(BAD);
        assert_eq!(charge.read("{},".repeat(ONE / 4096).as_bytes()), Err(Unchecked::TooLarge));
    }

    #[rstest::rstest]
    #[case::brackets(r#"{[,"#, OBJECT + 2 * ELEMENT)]
    #[case::in_a_string(r#""{[,""#, 5 * BYTE)]
    #[case::behind_a_string(r#""a"{"#, 3 * BYTE + OBJECT)]
    #[case::a_quote_in_a_string(r#""\"{"{"#, 5 * BYTE + OBJECT)]
    #[case::a_backslash_at_its_end(r#""\\"{"#, 4 * BYTE + OBJECT)]
    fn what_stands_in_strings_is_a_string(#[case] text: &str, #[case] want: usize) {
        assert_eq!(weight(text.as_bytes()), want);
    }

    #[rstest::rstest]
    #[case::whole(r#"{"kind":"AdmissionReview","request":{"uid":"u","object":{}}}"#, Some("u"))]
    #[case::cut_off(r#"{"kind":"AdmissionReview","request":{"uid":"u","object":{"a"#, Some("u"))]
    #[case::cut_off_before(r#"{"kind":"AdmissionReview","request":{"ui"#, None)]
    #[case::another_one(r#"{"uid":"no","request":{"object":{"uid":"no"}}}"#, None)]
    #[case::no_text(r#"{"request":{"uid":7}}"#, None)]
    fn the_uid_is_found_in_the_beginning(#[case] head: &str, #[case] expected: Option<&str>) {
        assert_eq!(string(head.as_bytes(), &["request", "uid"]).as_deref(), expected);
    }
}
