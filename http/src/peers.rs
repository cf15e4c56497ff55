//! Limits the connections of each peer.
//!
//! A client with many addresses can open all connections without exceeding the limit of one address. So when
//! all connections are taken, a peer without any still gets in, and a peer with few gets in before those that
//! have more. The new connection takes the place of one that had no answer yet, the oldest of those first,
//! because a client that has something to ask does so at once. If there is none, it takes the place of the
//! youngest one that waits for its next request, so that older clients go on. A connection with a request
//! that is being answered, or with a known client, stays.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// The limits of connections.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// The most connections in total.
    pub all: usize,
    /// The most connections of one address.
    pub of_one: usize,
    /// True if a further connection of an address at its limit takes the place of one of its own; false if it
    /// is closed.
    pub renews: bool,
}

/// The connections of all peers. Clones share their state.
#[derive(Debug, Clone)]
pub struct Peers {
    bounds: Bounds,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// Connections by peer, and by number, which increases with time.
    peers: HashMap<IpAddr, BTreeMap<u64, Connection>>,
}

/// The state of a connection.
#[derive(Debug, Default)]
struct Connection {
    /// Cancelled when the connection's place is given to another.
    displaced: CancellationToken,
    /// True if the peer is known by a certificate or a token.
    is_known: bool,
    /// The number of requests that are being answered.
    answering: usize,
    /// True if a request was answered.
    had_answer: bool,
}

impl Connection {
    /// Returns how readily the connection gives up its place, where higher values yield first; `None` if
    /// never. `age` is smaller for older connections.
    fn yields(&self, age: u64) -> Option<(bool, u64)> {
        let stays = self.is_known || self.answering > 0;
        (!stays).then(|| if self.had_answer { (false, age) } else { (true, u64::MAX - age) })
    }
}

impl Open {
    fn of(&self, peer: IpAddr) -> usize {
        self.peers.get(&peer).map_or(0, BTreeMap::len)
    }

    fn remove(&mut self, peer: IpAddr, number: u64) -> Option<Connection> {
        let held = self.peers.get_mut(&peer)?;
        let removed = held.remove(&number);
        if held.is_empty() {
            self.peers.remove(&peer);
        }
        removed
    }

    /// Frees the place of a connection of the selected peers; `None` if no connection yields.
    fn displace(&mut self, of: impl Fn(IpAddr, usize) -> bool) -> Option<()> {
        let those = self.peers.iter().filter(|(peer, held)| of(**peer, held.len()));
        let those = those.flat_map(|(peer, held)| held.iter().map(|(number, held)| (*peer, *number, held)));
        let yielding = those.filter_map(|(peer, number, held)| Some((held.yields(number)?, peer, number)));
        let (_, peer, number) = yielding.max()?;
        self.remove(peer, number)?.displaced.cancel();
        Some(())
    }
}

impl Peers {
    /// Returns the connections of no peer yet.
    pub fn new(bounds: Bounds) -> Self {
        Self { bounds, open: Arc::default() }
    }

    /// Adds a connection of a peer; `None` if the peer is at its limit, or all places are taken and no
    /// connection yields.
    pub fn connect(&self, peer: IpAddr) -> Option<Connected> {
        let mut open = self.open.lock();
        let own = open.of(peer);
        if own >= self.bounds.of_one {
            if !self.bounds.renews {
                return None;
            }
            open.displace(|other, _| other == peer)?;
        } else if open.peers.values().map(BTreeMap::len).sum::<usize>() >= self.bounds.all {
            // Exchanging places between peers with three and two connections would gain nothing.
            open.displace(|_, theirs| own == 0 || theirs > own + 1)?;
        }
        let (number, connection) = (open.next, Connection::default());
        open.next += 1;
        let displaced = connection.displaced.clone();
        open.peers.entry(peer).or_default().insert(number, connection);
        let place = Place { peers: self.clone(), peer, number };
        Some(Connected { place, displaced })
    }

    /// Returns the next connection that gets a place; others are closed.
    pub async fn accept(&self, listener: &TcpListener) -> (TcpStream, Connected) {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => match self.connect(peer.ip().to_canonical()) {
                    Some(connected) => return (stream, connected),
                    None => tracing::debug!(%peer, "a connection too many"),
                },
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// The place of a connection. Clones are the same place.
#[derive(Debug, Clone)]
pub struct Place {
    peers: Peers,
    peer: IpAddr,
    number: u64,
}

impl Place {
    fn note(&self, note: impl FnOnce(&mut Connection)) {
        let mut open = self.peers.open.lock();
        // The connection is missing if its place was given to another.
        if let Some(connection) = open.peers.get_mut(&self.peer).and_then(|held| held.get_mut(&self.number)) {
            note(connection);
        }
    }

    /// Returns the address of the peer.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// Marks the peer as known by its certificate or token; from now on, the connection keeps its place.
    pub fn is_known(&self) {
        self.note(|connection| connection.is_known = true);
    }

    /// Marks a request as complete; it counts as being answered while the returned value lives.
    pub fn answering(&self) -> Answering {
        self.note(|connection| connection.answering += 1);
        Answering(self.clone())
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub struct Answering(Place);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.note(|connection| {
            connection.answering -= 1;
            connection.had_answer = true;
        });
    }
}

/// A connection of a peer, for as long as this value lives.
#[derive(Debug)]
pub struct Connected {
    place: Place,
    displaced: CancellationToken,
}

impl Connected {
    /// Returns the address of the peer.
    pub fn peer(&self) -> IpAddr {
        self.place.peer
    }

    /// Returns the place of the connection.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Runs `serve` to its end; returns `None` if the place is given to another before.
    pub async fn serve<T>(self, serve: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.displaced.cancelled() => None,
            result = serve => Some(result),
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let Place { peers, peer, number } = &self.place;
        // The connection is missing if its place was given to another.
        let _ = peers.open.lock().remove(*peer, *number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn one_peer_has_its_part_of_the_connections_and_gets_it_back() {
        let peers = Peers::new(Bounds { all: 512, of_one: 16, renews: false });
        let held: Vec<_> = (0..100).filter_map(|_| peers.connect(address(1))).collect();
        assert_eq!(held.len(), 16);
        assert!(peers.connect(address(2)).is_some());
        drop(held);
        assert!(peers.connect(address(1)).is_some());
        assert!(peers.open.lock().peers.is_empty());
    }

    #[test]
    fn where_all_are_taken_a_peer_with_few_takes_the_oldest_of_one_with_more() {
        let peers = Peers::new(Bounds { all: 5, of_one: 4, renews: false });
        let many: Vec<_> = (0..4).filter_map(|_| peers.connect(address(1))).collect();
        let one = peers.connect(address(2)).expect("a place");
        let second = peers.connect(address(2)).expect("that of one with more");
        let displaced: Vec<_> = many.iter().map(|held| held.displaced.is_cancelled()).collect();
        assert_eq!(displaced, [true, false, false, false]);
        assert!(peers.connect(address(2)).is_none(), "3 and 2 are as good as 2 and 3");
        drop(many);
        assert_eq!(peers.open.lock().peers.values().map(BTreeMap::len).sum::<usize>(), 2);
        drop((one, second));
        assert!(peers.open.lock().peers.is_empty());
    }

    /// A tenant has as many addresses as pods.
    #[test]
    fn however_many_peers_take_all_connections_one_that_has_none_gets_in() {
        for of_each in [16, 1] {
            let peers = Peers::new(Bounds { all: 32, of_one: 16, renews: false });
            let hostile = (1..=32).flat_map(|last| (0..of_each).map(move |_| address(last)));
            let held: Vec<_> = hostile.filter_map(|peer| peers.connect(peer)).collect();
            assert!(peers.connect(address(200)).is_some(), "{of_each} each");
            assert!(held.iter().filter(|held| !held.displaced.is_cancelled()).count() < 32);
        }
    }

    fn is_open(connected: &Connected) -> bool {
        !connected.displaced.is_cancelled()
    }

    /// As it was seen: the API server is who has most, and its connections are the oldest.
    #[test]
    fn connections_that_had_answers_stay_however_many_peers_come_and_ask_nothing() {
        let peers = Peers::new(Bounds { all: 512, of_one: 16, renews: false });
        let api_server: Vec<_> = (0..3).filter_map(|_| peers.connect(address(1))).collect();
        for connected in &api_server {
            drop(connected.place().answering());
        }
        let stranger = |number: u16| {
            let [high, low] = number.to_be_bytes();
            peers.connect(IpAddr::from([10, 1, high, low]))
        };
        let held: Vec<_> = (0..600).map(stranger).collect();
        assert!(held.iter().all(Option::is_some), "whoever has none gets in");
        assert!(api_server.iter().all(is_open));
        // Those that ask something as well come after those that were there before.
        for connected in held.iter().flatten() {
            drop(connected.place().answering());
        }
        let later: Vec<_> = (600..1200).map(stranger).collect();
        assert!(later.iter().all(Option::is_some));
        assert!(api_server.iter().all(is_open));
    }

    #[test]
    fn what_is_being_answered_and_who_is_known_stays() {
        let peers = Peers::new(Bounds { all: 3, of_one: 2, renews: false });
        let held: Vec<_> = (1..=3).filter_map(|last| peers.connect(address(last))).collect();
        held[0].place().is_known();
        let first = held[1].place().answering();
        let second = held[1].place().answering();
        drop(first);
        let next = peers.connect(address(4)).expect("the one that asks nothing");
        assert_eq!(held.iter().map(is_open).collect::<Vec<_>>(), [true, true, false]);
        next.place().is_known();
        assert!(peers.connect(address(5)).is_none());
        drop(second);
        assert!(peers.connect(address(5)).is_some());
        assert_eq!(held.iter().map(is_open).collect::<Vec<_>>(), [true, false, false]);
    }

    #[test]
    fn one_more_of_an_address_that_has_its_part_takes_the_place_of_its_own_oldest_idle_one() {
        let peers = Peers::new(Bounds { all: 64, of_one: 3, renews: true });
        let other = peers.connect(address(2)).expect("a place");
        let held: Vec<_> = (0..3).filter_map(|_| peers.connect(address(1))).collect();
        let answering: Vec<_> = held[..1].iter().map(|held| held.place().answering()).collect();
        let probe = peers.connect(address(1)).expect("the place of the second");
        assert_eq!(held.iter().map(is_open).collect::<Vec<_>>(), [true, false, true]);
        assert!(is_open(&other));
        let more = [held[2].place().answering(), probe.place().answering()];
        assert!(peers.connect(address(1)).is_none(), "all three are being answered");
        drop((answering, more));
    }
}
