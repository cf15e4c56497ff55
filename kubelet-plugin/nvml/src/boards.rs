//! Caches the facts of boards and their profiles. Reading them takes dozens of calls, and the answers are
//! valid for as long as the library is open.

use crate::nvlink::{Links, SWITCHES, Wiring};
use crate::pci::PciPosition;
use crate::raw::CiProfile;
use aliquot_model::{Architecture, GpuUuid, MigProfile};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::convert::Infallible;

/// The facts of a GPU that never change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Board {
    pub(crate) product_name: String,
    pub(crate) brand: &'static str,
    pub(crate) architecture: Architecture,
    pub(crate) compute_capability: (u32, u32),
    /// The number of CUDA cores, if the driver reports it.
    pub(crate) cores: Option<u32>,
    /// The PCI address as the kernel writes it.
    pub(crate) pci_bus_id: Option<String>,
    pub(crate) position: PciPosition,
}

/// The facts of the GPUs that were asked.
#[derive(Debug, Default)]
pub(crate) struct Boards {
    boards: Known<GpuUuid, Board>,
    /// The profiles, by GPU and MIG mode.
    profiles: Known<(GpuUuid, bool), Vec<MigProfile>>,
    /// The profiles by which GPU instances are listed, in MIG mode.
    gi_profiles: Known<GpuUuid, Vec<(u32, u32)>>,
    /// The compute-instance profiles that a GPU instance of a profile can have.
    ci_profiles: Known<(GpuUuid, u32), Vec<CiProfile>>,
    links: Known<GpuUuid, Links>,
    wiring: Wiring,
}

impl Boards {
    /// Returns a GPU's board. A read that fails is repeated the next time.
    pub(crate) fn board<E>(
        &self,
        gpu: &GpuUuid,
        read: impl FnOnce() -> Result<Board, E>,
    ) -> Result<Board, E> {
        self.boards.get(gpu.clone(), |_| true, read)
    }

    /// Returns the profiles of a GPU in a mode. The answer is not kept if the read fails, if the board
    /// reports no profiles, or if the mode was switched meanwhile.
    pub(crate) fn profiles<E>(
        &self,
        gpu: &GpuUuid,
        enabled: bool,
        read: impl FnOnce() -> Result<Vec<MigProfile>, E>,
        is_enabled: impl FnOnce() -> Option<bool>,
    ) -> Result<Vec<MigProfile>, E> {
        let lasts = |profiles: &Vec<_>| !profiles.is_empty() && is_enabled() == Some(enabled);
        self.profiles.get((gpu.clone(), enabled), lasts, read)
    }

    /// Returns the IDs of the profiles by which GPU instances are listed while the mode is on, and the
    /// largest number of instances of each.
    pub(crate) fn gi_profiles<E>(
        &self,
        gpu: &GpuUuid,
        read: impl FnOnce() -> Result<Vec<(u32, u32)>, E>,
    ) -> Result<Vec<(u32, u32)>, E> {
        self.gi_profiles.get(gpu.clone(), |profiles| !profiles.is_empty(), read)
    }

    /// Returns the compute-instance profiles that a GPU instance of a profile can have.
    pub(crate) fn ci_profiles<E>(
        &self,
        gpu: &GpuUuid,
        profile_id: u32,
        read: impl FnOnce() -> Result<Vec<CiProfile>, E>,
    ) -> Result<Vec<CiProfile>, E> {
        self.ci_profiles.get((gpu.clone(), profile_id), |profiles| !profiles.is_empty(), read)
    }

    /// Returns true if a GPU's NVLinks lead to NVSwitches, and its domain (see [`crate::nvlink`]). Links from
    /// GPU to GPU are off in MIG mode: the links seen before count then. They are read again until all of
    /// them are up.
    pub(crate) fn nvlink(
        &self,
        gpu: &GpuUuid,
        bus_id: Option<&str>,
        mig_mode: bool,
        read: impl FnOnce() -> Links,
    ) -> (bool, Option<String>) {
        let is_seen = |links: &Links| !mig_mode || matches!(links, Links::Switches | Links::Fabric(_));
        let lasts = |links: &Links| links.lasts() && is_seen(links);
        let Ok(links) = self.links.get(gpu.clone(), lasts, || Ok::<_, Infallible>(read()));
        let seen = is_seen(&links);
        match (links, bus_id) {
            (Links::Switches, _) => (true, Some(SWITCHES.to_owned())),
            (Links::Fabric(domain), _) => (true, domain),
            (Links::Gpus { .. }, None) => (false, None),
            (Links::Gpus { peers, .. }, Some(bus_id)) => {
                if seen {
                    self.wiring.learn(bus_id, peers);
                }
                (false, self.wiring.domain(bus_id))
            }
        }
    }
}

/// Answers that are kept, by the question's key.
#[derive(Debug)]
struct Known<K, V>(Mutex<BTreeMap<K, V>>);

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord, V: Clone> Known<K, V> {
    fn get<E>(
        &self,
        key: K,
        lasts: impl FnOnce(&V) -> bool,
        read: impl FnOnce() -> Result<V, E>,
    ) -> Result<V, E> {
        if let Some(known) = self.0.lock().get(&key) {
            return Ok(known.clone());
        }
        // The lock is not held here: a GPU that does not answer must not hold up the others.
        let value = read()?;
        if lasts(&value) {
            self.0.lock().insert(key, value.clone());
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::h100_80;
    use rstest::rstest;

    #[test]
    fn a_board_is_asked_once_a_mode_and_again_after_no_answer() {
        let info = h100_80(0);
        let (boards, gpu) = (Boards::default(), &info.uuid);
        let off = |read: Result<Vec<MigProfile>, &'static str>| {
            boards.profiles(gpu, false, || read, || Some(false))
        };
        assert_eq!(off(Err("lost")), Err("lost"));
        assert_eq!(off(Ok(Vec::new())), Ok(Vec::new()));
        let known = info.profiles().to_vec();
        let switched = boards.profiles(gpu, false, || Ok::<_, &str>(known[..1].to_vec()), || Some(true));
        assert_eq!(switched, Ok(known[..1].to_vec()), "and not kept");
        for _ in 0..2 {
            assert_eq!(off(Ok(known.clone())), Ok(known.clone()));
        }
        assert_eq!(off(Err("asked twice")), Ok(known));
        assert_eq!(boards.profiles(gpu, true, || Err("another mode"), || None), Err("another mode"));
        let other = h100_80(1).uuid;
        assert_eq!(boards.profiles(&other, false, || Err("another GPU"), || None), Err("another GPU"));
    }

    /// Whether a second look asks again.
    #[rstest]
    #[case::a_fabric_may_change(Links::Fabric(Some("a.1".to_owned())), false, true)]
    #[case::switches_stay(Links::Switches, false, false)]
    #[case::links_that_are_up_stay(Links::Gpus { peers: vec!["b".to_owned()], all_up: true }, false, false)]
    #[case::a_link_may_come_up(Links::Gpus { peers: vec!["b".to_owned()], all_up: false }, false, true)]
    #[case::links_are_off_in_mig_mode(Links::Gpus { peers: Vec::new(), all_up: true }, true, true)]
    fn links_are_asked_for_until_they_cannot_change(
        #[case] links: Links,
        #[case] mig_mode: bool,
        #[case] again: bool,
    ) {
        let (boards, gpu) = (Boards::default(), h100_80(0).uuid);
        let first = boards.nvlink(&gpu, Some("a"), mig_mode, || links.clone());
        let mut asked = false;
        let second = boards.nvlink(&gpu, Some("a"), mig_mode, || {
            asked = true;
            links.clone()
        });
        assert_eq!((first, asked), (second, again));
    }
}
