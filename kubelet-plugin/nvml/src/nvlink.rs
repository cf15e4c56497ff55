//! Finds the GPUs that reach each other over NVLink.
//!
//! A GPU knows its own links. Links to NVSwitches put all GPUs that are connected to them into one domain.
//! With links from GPU to GPU, a domain is everything that can be reached over them. This takes the links of
//! others as well if not every GPU is linked to every other (as on a DGX-1).

use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};

/// The domain of GPUs that are connected to the NVSwitches of their machine.
pub(crate) const SWITCHES: &str = "nvswitch";

/// The targets of a GPU's links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Links {
    /// The links lead to NVSwitches.
    Switches,
    /// The links lead into a fabric, over NVSwitches; the value is the domain, once the GPU takes part.
    Fabric(Option<String>),
    /// The links lead to other GPUs, or nowhere.
    Gpus {
        /// The PCI addresses of the GPUs at the other ends of links that are up.
        peers: Vec<String>,
        /// True if all links are up. Links are down in MIG mode, and where there is no bridge.
        all_up: bool,
    },
}

impl Links {
    /// Returns true if this stays so for as long as the library is open.
    pub(crate) const fn lasts(&self) -> bool {
        match self {
            Self::Switches => true,
            // GPUs register with a fabric again when it changes.
            Self::Fabric(_) => false,
            Self::Gpus { all_up, .. } => *all_up,
        }
    }
}

/// Returns the domain in a fabric. NVIDIA's label `nvidia.com/gpu.clique` has the same value for a fabric
/// over several machines. A fabric of a single machine has no identity.
pub(crate) fn fabric_domain(cluster: [u8; 16], clique: u32) -> String {
    let cluster = uuid::Uuid::from_bytes(cluster);
    match (cluster.is_nil(), clique) {
        (true, 0) => SWITCHES.to_owned(),
        (true, clique) => format!("{SWITCHES}.{clique}"),
        (false, clique) => format!("{cluster}.{clique}"),
    }
}

/// The links between GPUs that were read so far, by PCI address.
#[derive(Debug, Default)]
pub(crate) struct Wiring(Mutex<BTreeMap<String, Vec<String>>>);

impl Wiring {
    /// Notes the targets of a GPU's links.
    pub(crate) fn learn(&self, gpu: &str, peers: Vec<String>) {
        self.0.lock().insert(gpu.to_owned(), peers);
    }

    /// Returns the domain of a GPU: the lowest PCI address that can be reached. Returns `None` if the GPU is
    /// linked to no other.
    pub(crate) fn domain(&self, gpu: &str) -> Option<String> {
        let links = self.0.lock();
        let reached = reach(&links, gpu);
        if reached.len() > 1 { reached.first().map(|lowest| (*lowest).to_owned()) } else { None }
    }
}

/// Returns all GPUs that links lead to from a GPU, itself included. A link counts if either end knows it.
fn reach<'a>(links: &'a BTreeMap<String, Vec<String>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut reached, mut next) = (BTreeSet::from([from]), vec![from]);
    while let Some(gpu) = next.pop() {
        let there = links.get(gpu).into_iter().flatten().map(String::as_str);
        let back = links.iter().filter(|(_, peers)| peers.iter().any(|peer| peer == gpu));
        for peer in there.chain(back.map(|(other, _)| other.as_str())) {
            if reached.insert(peer) {
                next.push(peer);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::one_machine(0, 0, "nvswitch")]
    #[case::a_partition_of_one_machine(0, 3, "nvswitch.3")]
    #[case::several_machines(0xab, 1, "abababab-abab-abab-abab-abababababab.1")]
    fn a_fabric_is_named_by_its_identity_and_partition(
        #[case] byte: u8,
        #[case] clique: u32,
        #[case] want: &str,
    ) {
        assert_eq!(fabric_domain([byte; 16], clique), want);
    }

    /// The domains after all GPUs were read twice, as far as they differ from the GPU's number.
    fn domains(links: &[Vec<usize>]) -> Vec<Option<usize>> {
        let address = |gpu: usize| format!("0000:{gpu:02x}:00.0");
        let wiring = Wiring::default();
        let mut found = Vec::new();
        for _ in 0..2 {
            found = (0..links.len())
                .map(|gpu| {
                    wiring.learn(&address(gpu), links[gpu].iter().map(|peer| address(*peer)).collect());
                    let domain = wiring.domain(&address(gpu))?;
                    (0..links.len()).find(|gpu| address(*gpu) == domain)
                })
                .collect();
        }
        found
    }

    #[rstest]
    #[case::alone(vec![vec![], vec![]], &[None, None])]
    #[case::bridges(vec![vec![1, 1], vec![0, 0], vec![3], vec![2], vec![]], &[Some(0), Some(0), Some(2), Some(2), None])]
    #[case::one_end_tells(vec![vec![], vec![0], vec![]], &[Some(0), Some(0), None])]
    #[case::over_others(vec![vec![3], vec![2], vec![1, 3], vec![0, 2]], &[Some(0); 4])]
    fn a_domain_is_all_that_links_lead_to(#[case] links: Vec<Vec<usize>>, #[case] want: &[Option<usize>]) {
        assert_eq!(domains(&links), want);
    }

    #[test]
    fn links_that_went_away_are_forgotten() {
        let wiring = Wiring::default();
        wiring.learn("b", vec!["a".into()]);
        assert_eq!(wiring.domain("b").as_deref(), Some("a"));
        wiring.learn("b", Vec::new());
        assert_eq!(wiring.domain("b"), None);
    }
}
