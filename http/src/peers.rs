//! How many connections each peer has.
//!
//! Whoever has many addresses can take all connections within the bound for one of them. So where all are taken,
//! whoever has none still gets in, and whoever has few does before those that have more: in the place of the oldest
//! connection of a peer that has most.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// How many connections there may be.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// In all.
    pub all: usize,
    /// Of one address.
    pub of_one: usize,
}

/// The connections of all peers. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct Peers {
    bounds: Bounds,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// By peer and age; a token tells the connection that its place is another's.
    peers: HashMap<IpAddr, BTreeMap<u64, CancellationToken>>,
}

impl Open {
    fn of(&self, peer: IpAddr) -> usize {
        self.peers.get(&peer).map_or(0, BTreeMap::len)
    }

    fn remove(&mut self, peer: IpAddr, number: u64) -> Option<CancellationToken> {
        let held = self.peers.get_mut(&peer)?;
        let removed = held.remove(&number);
        if held.is_empty() {
            self.peers.remove(&peer);
        }
        removed
    }

    /// Takes a place for a peer that has `own` connections; `None` if nobody has so many more.
    fn displace_for(&mut self, own: usize) -> Option<()> {
        let most = self.peers.values().map(BTreeMap::len).max()?;
        if own > 0 && own + 1 >= most {
            return None;
        }
        let those = self.peers.iter().filter(|(_, held)| held.len() == most);
        let (number, peer) =
            those.filter_map(|(peer, held)| Some((*held.first_key_value()?.0, *peer))).min()?;
        self.remove(peer, number)?.cancel();
        Some(())
    }
}

impl Peers {
    /// With no connection yet.
    pub fn new(bounds: Bounds) -> Self {
        Self { bounds, open: Arc::default() }
    }

    /// One more connection of a peer, unless it has its part, or all are taken and nobody has so many more.
    pub fn connect(&self, peer: IpAddr) -> Option<Connected> {
        let mut open = self.open.lock();
        let own = open.of(peer);
        if own >= self.bounds.of_one {
            return None;
        }
        if open.peers.values().map(BTreeMap::len).sum::<usize>() >= self.bounds.all {
            open.displace_for(own)?;
        }
        let (number, displaced) = (open.next, CancellationToken::new());
        open.next += 1;
        open.peers.entry(peer).or_default().insert(number, displaced.clone());
        Some(Connected { peers: self.clone(), peer, number, displaced })
    }

    /// The next connection that gets in; the others are closed.
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

/// A peer's connection, for as long as it lives.
#[derive(Debug)]
pub struct Connected {
    peers: Peers,
    peer: IpAddr,
    number: u64,
    displaced: CancellationToken,
}

impl Connected {
    /// Whose it is.
    pub fn peer(&self) -> IpAddr {
        self.peer
    }

    /// Serves it until that ends, or until its place is another's: then there is no result.
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
        // Nothing is there any more if its place is another's.
        let _ = self.peers.open.lock().remove(self.peer, self.number);
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
        let peers = Peers::new(Bounds { all: 512, of_one: 16 });
        let held: Vec<_> = (0..100).filter_map(|_| peers.connect(address(1))).collect();
        assert_eq!(held.len(), 16);
        assert!(peers.connect(address(2)).is_some());
        drop(held);
        assert!(peers.connect(address(1)).is_some());
        assert!(peers.open.lock().peers.is_empty());
    }

    #[test]
    fn where_all_are_taken_a_peer_with_few_takes_the_oldest_of_one_with_most() {
        let peers = Peers::new(Bounds { all: 5, of_one: 4 });
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
            let peers = Peers::new(Bounds { all: 32, of_one: 16 });
            let hostile = (1..=32).flat_map(|last| (0..of_each).map(move |_| address(last)));
            let held: Vec<_> = hostile.filter_map(|peer| peers.connect(peer)).collect();
            assert!(peers.connect(address(200)).is_some(), "{of_each} each");
            assert!(held.iter().filter(|held| !held.displaced.is_cancelled()).count() < 32);
        }
    }
}
