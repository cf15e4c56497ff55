//! Limits the memory of all reviews together, from the first byte of a body to the answer.
//!
//! Everybody who reaches the port can send reviews, many at a time, and text grows when it is read: two bytes
//! can be an object of their own. So a review is charged for what it can become, before it is read. A review
//! beyond the limit is not read, and its answer is that it was not checked.
//!
//! A body is charged for its bytes while it comes in. Once it is complete and names its namespace, it is
//! charged for what it can become. Three quarters of the memory are for peers that have at most half each of
//! what the others leave; the last quarter is for reviews of peers that have little. Among a peer's reviews,
//! those of one namespace may have an eighth of all memory. Where that is not enough, incomplete bodies give
//! way to peers that have less in incomplete bodies: the largest body of the peer with the most goes first.
//! So a sender of reviews, or a user who makes the API server send some, leaves room for the reviews of
//! others.

use super::evaluators::Unchecked;
use super::origin::Peer;
use super::review::{self, App};
use aliquot_http::Place;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use parking_lot::Mutex;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The longest body, in bytes: a review contains an object twice, and etcd accepts 1.5 MiB.
pub(super) const BODY: usize = 4 << 20;
/// The most bytes that all reviews are charged for, and the most of one origin or one review. Evaluations
/// that go on after their review was answered hold at most four further reviews.
const ALL: usize = 128 << 20;
const ONE: usize = ALL / 8;
/// The longest time in which a body may come in: the API server itself waits no longer than `timeoutSeconds`,
/// which is 5 s in the chart.
const WITHIN: Duration = Duration::from_secs(5);
/// The charge for a byte of a body while it comes in: the buffer may be twice as large.
const BUFFERED: usize = 2;
/// The charge for a byte of text: the body and the buffer that it is read into, strings, and copies of them.
const BYTE: usize = 4;
/// The charge for an object, and for an element of a list or an object, once they are read: the node of a
/// map, and the API's structs, of which Container is the largest with 2.1 KiB.
const OBJECT: usize = 4096;
const ELEMENT: usize = 256;
/// The part of an unread review in which the UID is looked for, in bytes: the API server writes the UID
/// first.
const HEAD: usize = 4096;

/// The memory of reviews. Clones share their state.
#[derive(Debug, Clone)]
pub(super) struct ReviewMemory {
    all: usize,
    used: Arc<Mutex<Used>>,
}

/// The charges of reviews, by sender.
#[derive(Debug, Default)]
struct Used {
    next: u64,
    peers: HashMap<Peer, Held>,
}

/// The charges of one peer's reviews.
#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    /// The charges of complete reviews, by the namespace that they name.
    namespaces: HashMap<String, usize>,
    /// The bodies that are coming in; `coming_in` is their total charge.
    bodies: BTreeMap<u64, Incoming>,
    coming_in: usize,
}

/// A body that is coming in.
#[derive(Debug)]
struct Incoming {
    bytes: usize,
    /// Cancelled when the body's memory is given to another peer.
    displaced: CancellationToken,
}

/// Returns true if a peer may have `own` bytes of all, given what the others have.
const fn fits(all: usize, others: usize, own: usize) -> bool {
    own <= (all / 4 * 3).saturating_sub(others) / 2 || own <= all / 128 && others + own <= all
}

impl Used {
    fn others(&self, peer: Peer) -> usize {
        self.peers.iter().filter(|(other, _)| **other != peer).map(|(_, held)| held.bytes).sum()
    }

    /// Takes memory from incoming bodies until there is room for what the peer will have: `own` in total, of
    /// which `coming_in` in incoming bodies. Takes nothing and returns false if that would not be enough.
    fn make_room(&mut self, all: usize, peer: Peer, own: usize, coming_in: usize) -> bool {
        let more = |(other, held): &(&Peer, &mut Held)| **other != peer && held.coming_in > coming_in;
        let theirs: usize = self.peers.iter_mut().filter(more).map(|(_, held)| held.coming_in).sum();
        if !fits(all, self.others(peer).saturating_sub(theirs), own) {
            return false;
        }
        while !fits(all, self.others(peer), own) {
            let most = self.peers.iter_mut().filter(more).map(|(_, held)| held);
            let Some(held) = most.max_by_key(|held| held.coming_in) else { return false };
            let Some(body) = held.bodies.values_mut().max_by_key(|body| body.bytes) else { return false };
            held.bytes -= body.bytes;
            held.coming_in -= body.bytes;
            body.bytes = 0;
            body.displaced.cancel();
        }
        true
    }

    /// Charges a peer `bytes` in place of `instead`; `coming_in` is what it will have in incoming bodies.
    fn charge(
        &mut self,
        all: usize,
        peer: Peer,
        instead: usize,
        bytes: usize,
        coming_in: usize,
    ) -> Result<(), Unchecked> {
        let own = self.peers.get(&peer).map_or(0, |held| held.bytes) - instead + bytes;
        if bytes > instead && !self.make_room(all, peer, own, coming_in) {
            return Err(Unchecked::OutOfMemory);
        }
        let held = self.peers.entry(peer).or_default();
        (held.bytes, held.coming_in) = (own, coming_in);
        Ok(())
    }
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self::of(ALL)
    }
}

impl ReviewMemory {
    /// Returns a memory with a limit of `all` bytes.
    pub(super) fn of(all: usize) -> Self {
        Self { all, used: Arc::default() }
    }

    /// Returns the current charge of all reviews, in bytes.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.lock().peers.values().map(|held| held.bytes).sum()
    }

    fn charge(&self, peer: Peer) -> Charge {
        let mut used = self.used.lock();
        let (number, displaced) = (used.next, CancellationToken::new());
        used.next += 1;
        let body = Incoming { bytes: 0, displaced: displaced.clone() };
        used.peers.entry(peer).or_default().bodies.insert(number, body);
        Charge { memory: self.clone(), peer, number, displaced, whole: None }
    }
}

/// The charge of one review, for as long as this value lives.
#[derive(Debug)]
struct Charge {
    memory: ReviewMemory,
    peer: Peer,
    number: u64,
    /// Cancelled when the memory of the review is given to another peer, which happens only while its body
    /// comes in.
    displaced: CancellationToken,
    /// The namespace that the review names, and its charge, once its body is complete.
    whole: Option<(String, usize)>,
}

impl Charge {
    /// Sets the total charge of an incoming body to `bytes`. Returns an error if there is no memory for it.
    fn be(&mut self, bytes: usize) -> Result<(), Unchecked> {
        if bytes > ONE {
            return Err(Unchecked::TooLarge);
        }
        let mut used = self.memory.used.lock();
        let Some(held) = used.peers.get(&self.peer) else { return Ok(()) };
        let Some(before) = held.bodies.get(&self.number).map(|body| body.bytes) else { return Ok(()) };
        let coming_in = held.coming_in - before + bytes;
        used.charge(self.memory.all, self.peer, before, bytes, coming_in)?;
        let held = used.peers.get_mut(&self.peer);
        if let Some(body) = held.and_then(|held| held.bodies.get_mut(&self.number)) {
            body.bytes = bytes;
        }
        Ok(())
    }

    /// Charges for a complete body. Returns an error if there is no memory for it.
    fn read(&mut self, text: &[u8]) -> Result<(), Unchecked> {
        let bytes = weight(text);
        if bytes > ONE {
            return Err(Unchecked::TooLarge);
        }
        // Reviews without a namespace have a part of their own.
        let namespace = string(text, &["request", "namespace"]).unwrap_or_default();
        let mut used = self.memory.used.lock();
        let Some(held) = used.peers.get(&self.peer) else { return Ok(()) };
        let part = held.namespaces.get(&namespace).copied().unwrap_or_default() + bytes;
        if self.displaced.is_cancelled() || part > self.memory.all / 8 {
            return Err(Unchecked::OutOfMemory);
        }
        let before = held.bodies.get(&self.number).map_or(0, |body| body.bytes);
        let coming_in = held.coming_in - before;
        used.charge(self.memory.all, self.peer, before, bytes, coming_in)?;
        if let Some(held) = used.peers.get_mut(&self.peer) {
            held.bodies.remove(&self.number);
            held.namespaces.insert(namespace.clone(), part);
        }
        self.whole = Some((namespace, bytes));
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut used = self.memory.used.lock();
        let Some(held) = used.peers.get_mut(&self.peer) else { return };
        if let Some(body) = held.bodies.remove(&self.number) {
            held.bytes -= body.bytes;
            held.coming_in -= body.bytes;
        }
        if let Some((namespace, bytes)) = &self.whole {
            held.bytes -= bytes;
            if let Some(part) = held.namespaces.get_mut(namespace) {
                *part -= bytes;
                if *part == 0 {
                    held.namespaces.remove(namespace);
                }
            }
        }
        if held.bodies.is_empty() && held.namespaces.is_empty() {
            used.peers.remove(&self.peer);
        }
    }
}

/// Returns the memory that JSON text can take once it is read, in bytes. It is computed without reading the
/// text, from the brackets and commas outside of strings.
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

/// Reads the body of a review as far as there is memory for it, and has the review answered. The rest of a
/// refused body is discarded.
pub(super) async fn within(
    State((app, memory)): State<(App, ReviewMemory)>,
    request: Request,
    next: Next,
) -> Response {
    let extensions = request.extensions();
    let (Some(peer), Some(place)) = (extensions.get().copied(), extensions.get().cloned()) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let place: Place = place;
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
            // The API server applies the webhook's failure policy.
            None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        };
    }
    let _answering = place.answering();
    let answer = next.run(Request::from_parts(head, Body::from(Bytes::from(text)))).await;
    drop(charge);
    answer
}

/// Returns a complete body, or the beginning of one and the reason why the rest was discarded.
async fn take_in(body: Body, charge: &mut Charge) -> Result<(Vec<u8>, Result<(), Unchecked>), StatusCode> {
    let (mut text, mut length, mut taken) = (Vec::new(), 0, Ok(()));
    let mut parts = body.into_data_stream();
    loop {
        let displaced = charge.displaced.clone();
        let part = tokio::select! {
            biased;
            () = displaced.cancelled(), if taken.is_ok() => Ok(Bytes::new()),
            part = parts.next() => match part {
                Some(part) => part.map_err(|_| StatusCode::BAD_REQUEST),
                None => return Ok((text, taken)),
            },
        }?;
        length += part.len();
        if length > BODY {
            return Err(StatusCode::PAYLOAD_TOO_LARGE);
        }
        if taken.is_ok() {
            taken = match displaced.is_cancelled() {
                true => Err(Unchecked::OutOfMemory),
                false => charge.be(length * BUFFERED),
            };
        }
        if taken.is_ok() {
            text.extend_from_slice(&part);
        } else if text.len() < HEAD || text.capacity() > HEAD {
            text = begin(&text, &part);
            let _ = charge.be(0);
        }
    }
}

/// Returns the beginning of two pieces of text together.
fn begin(text: &[u8], more: &[u8]) -> Vec<u8> {
    text.iter().chain(more).take(HEAD).copied().collect()
}

/// Returns the string at a path of the review, if the text contains it.
fn string(text: &[u8], path: &'static [&'static str]) -> Option<String> {
    let mut found = None;
    let mut text = serde_json::Deserializer::from_slice(text);
    // The text may be cut off, so an error means nothing.
    let _ = At { path, found: &mut found }.deserialize(&mut text);
    found
}

/// Reads the string at a path of an object, and no further.
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
    use std::net::{IpAddr, Ipv4Addr};

    const BAD: Peer = Peer(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
    const GOOD: Peer = Peer(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
    /// Connections that an address may have, with so many requests each.
    const REQUESTS: usize = 16 * 8;

    fn stranger(number: u8) -> Peer {
        Peer(IpAddr::from([10, 1, 0, number]))
    }

    fn review(namespace: &str, more: &str) -> Vec<u8> {
        format!(r#"{{"request":{{"uid":"u","namespace":"{namespace}","object":{more}}}}}"#).into_bytes()
    }

    /// What an ordinary pod becomes at most: half a MiB.
    fn ordinary(namespace: &str) -> Vec<u8> {
        let text = review(namespace, &format!("[{}]", vec!["{}"; 110].join(",")));
        assert!((400 << 10..500 << 10).contains(&weight(&text)), "{}", weight(&text));
        text
    }

    /// A body of which as much is sent as is taken.
    fn half_sent(memory: &ReviewMemory, peer: Peer) -> Charge {
        let mut charge = memory.charge(peer);
        let (mut taken, mut step) = (0, BODY);
        while step > 0 {
            if taken + step < BODY && charge.be((taken + step) * BUFFERED).is_ok() {
                taken += step;
            }
            step /= 2;
        }
        charge
    }

    #[test]
    fn a_peer_has_half_of_what_the_others_leave_and_gets_it_back() {
        let memory = ReviewMemory::of(128);
        let (mut bad, mut good) = (memory.charge(BAD), memory.charge(GOOD));
        assert_eq!(bad.be(49), Err(Unchecked::OutOfMemory));
        assert_eq!(bad.be(48), Ok(()));
        assert_eq!(memory.charge(BAD).be(1), Err(Unchecked::OutOfMemory));
        assert_eq!(good.be(48), Err(Unchecked::OutOfMemory), "as much is no less");
        assert_eq!(good.be(24), Ok(()));
        assert_eq!(bad.be(36), Ok(()), "what is given back is there again");
        assert_eq!(memory.used(), 60);
        drop((bad, good));
        assert!(memory.used.lock().peers.is_empty());
    }

    #[test]
    fn bodies_that_are_not_whole_give_way_to_peers_that_have_less_of_them() {
        let memory = ReviewMemory::of(128);
        let (mut large, mut small) = (memory.charge(BAD), memory.charge(BAD));
        assert_eq!((large.be(30), small.be(18)), (Ok(()), Ok(())));
        let mut good = memory.charge(GOOD);
        assert_eq!(good.be(28), Ok(()));
        assert!(large.displaced.is_cancelled() && !small.displaced.is_cancelled());
        assert_eq!((memory.used(), large.be(0)), (46, Ok(())));
        // What would not be enough is not taken.
        assert_eq!(memory.charge(stranger(1)).be(60), Err(Unchecked::OutOfMemory));
        assert!(!small.displaced.is_cancelled() && !good.displaced.is_cancelled());
        drop((large, small, good));
        assert!(memory.used.lock().peers.is_empty());
    }

    #[test]
    fn half_sent_bodies_leave_room_for_the_api_server_however_many_and_large_they_are() {
        for pods in [1, 8, 40] {
            let memory = ReviewMemory::default();
            let mut held = Vec::new();
            for pod in 1..=pods {
                held.extend((0..REQUESTS).map(|_| half_sent(&memory, stranger(pod))));
            }
            let mut reviews = Vec::new();
            for _ in 0..8 {
                let mut charge = memory.charge(GOOD);
                assert_eq!(charge.be(4096 * BUFFERED), Ok(()), "{pods} pods");
                assert_eq!(charge.read(&ordinary("good")), Ok(()), "{pods} pods");
                reviews.push(charge);
            }
            assert!(memory.used() <= ALL);
        }
    }

    #[test]
    fn whole_reviews_of_thirty_addresses_leave_room_for_the_api_server() {
        let memory = ReviewMemory::default();
        let mut held = Vec::new();
        for pod in 1..=30 {
            for at in 0..REQUESTS {
                let mut charge = memory.charge(stranger(pod));
                let size = [3900, 1000, 100, 10][at % 4];
                if charge.read(&review(&format!("n{at}"), &vec!["{}"; size].join(","))).is_ok() {
                    held.push(charge);
                }
            }
        }
        assert!(memory.used() > ALL / 4 * 3, "{}", memory.used());
        assert_eq!(memory.charge(GOOD).read(&ordinary("good")), Ok(()));
    }

    #[test]
    fn who_names_a_namespace_takes_nothing_of_what_others_have_for_it() {
        let memory = ReviewMemory::default();
        let mut held = Vec::new();
        for _ in 0..REQUESTS {
            let mut charge = memory.charge(BAD);
            let _ = charge.read(&review("victim", &vec!["{}"; 1000].join(",")));
            held.push(charge);
        }
        assert!(memory.used() > ONE - (8 << 20), "{}", memory.used());
        assert_eq!(memory.charge(GOOD).read(&ordinary("victim")), Ok(()));
    }

    #[tokio::test]
    async fn a_body_that_gave_way_is_not_taken_in_further_and_says_whose_it_is() {
        let memory = ReviewMemory::of(8 << 20);
        let (send, sent) = futures::channel::mpsc::unbounded::<Result<Bytes, std::io::Error>>();
        let mut charge = memory.charge(BAD);
        let begins = review("bad", &"x".repeat(1 << 20));
        let taking = tokio::spawn(async move {
            let taken = take_in(Body::from_stream(sent), &mut charge).await;
            (taken, charge)
        });
        send.unbounded_send(Ok(Bytes::from(begins))).expect("taken");
        while memory.used() == 0 {
            tokio::task::yield_now().await;
        }
        let mut good = memory.charge(GOOD);
        assert_eq!(good.be(2 << 20), Ok(()), "less than what the other has");
        drop(send);
        let (taken, _charge) = taking.await.expect("no panic");
        let (text, taken) = taken.expect("its beginning");
        assert_eq!((taken, text.len()), (Err(Unchecked::OutOfMemory), HEAD));
        assert_eq!(string(&text, &["request", "uid"]).as_deref(), Some("u"));
        assert_eq!(memory.used(), 2 << 20);
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
        assert!(memory.used.lock().peers.is_empty());
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
