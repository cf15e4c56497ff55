//! MIG life: mode, GPU instances, compute instances, MIG devices.

use crate::board::{Board, CiProfile, Engines, GiProfile, ci_profiles};
use crate::error::NodeError;
use crate::layout::{CiState, GiState, GpuState, MAX_CIS, MAX_GIS, State};
use crate::map::Locked;
use crate::memory::pid_namespace;
use crate::node::{Node, Pool};
use crate::root;
use crate::spec::{Gpu, ci_capability_minor, gi_capability_minor};

/// MIG mode of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// What is in force.
    pub current: bool,
    /// What the next reset brings.
    pub pending: bool,
}

/// What came of a change of the MIG mode; the change itself is recorded as pending in every case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// It is in force.
    Done,
    /// It waits for a reset of the GPU.
    ResetRequired,
    /// Processes, other clients or instances hold it up.
    InUse,
}

/// A GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GiInfo {
    /// GPU index.
    pub gpu: usize,
    /// Its id, a handle that is used again after it is gone.
    pub id: u32,
    /// Tells it from earlier ones with the same id.
    pub serial: u64,
    /// Its profile.
    pub profile: &'static GiProfile,
    /// First memory slice.
    pub start: u32,
    /// Memory slices.
    pub size: u32,
}

/// A compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CiInfo {
    /// GPU index.
    pub gpu: usize,
    /// GPU instance id.
    pub gi: u32,
    /// Serial of the GPU instance.
    pub gi_serial: u64,
    /// Its id in the GPU instance.
    pub id: u32,
    /// Its profile.
    pub profile: &'static CiProfile,
    /// First compute slice in the GPU instance.
    pub start: u32,
    /// Compute slices.
    pub size: u32,
}

/// A MIG device: a compute instance with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigDevice {
    /// The compute instance.
    pub ci: CiInfo,
    /// The GPU instance that it is in.
    pub gi: GiInfo,
    /// `MIG-…`.
    pub uuid: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Profile name as tools print it: `1g.10gb`, `1c.3g.40gb`.
    pub name: String,
}

impl Node {
    /// MIG mode of a GPU.
    pub fn mig_mode(&self, gpu: usize) -> Result<MigMode, NodeError> {
        self.mig_board(gpu)?;
        let state = self.lock()?;
        let gpu = gpu_state(&state, gpu)?;
        Ok(MigMode { current: gpu.mig_current == 1, pending: gpu.mig_pending == 1 })
    }

    /// Asks for a MIG mode. Ampere waits for [`Node::reset`]; later boards change at once when nobody uses the GPU, nor
    /// is a client of it ([`Node::hold_mode`]).
    pub fn set_mig_mode(&self, gpu: usize, on: bool) -> Result<Activation, NodeError> {
        let board = self.mig_board(gpu)?;
        let mut state = self.lock()?;
        self.may_manage(&state)?;
        self.reap(&mut state)?;
        let busy = !self.processes_in(&state, gpu)?.is_empty() || self.is_mode_held(gpu)?;
        let wanted = u32::from(on);
        let slot = gpu_state_mut(&mut state, gpu)?;
        slot.mig_pending = wanted;
        if slot.mig_current == wanted {
            return Ok(Activation::Done);
        }
        if board.mig_needs_reset {
            return Ok(Activation::ResetRequired);
        }
        if busy || slot.gis.iter().any(|gi| gi.in_use == 1) {
            return Ok(Activation::InUse);
        }
        self.bring(&mut state, gpu, wanted)?;
        Ok(Activation::Done)
    }

    /// Resets a GPU: instances go, the pending MIG mode comes. Refused while processes use it.
    pub fn reset(&self, gpu: usize) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        let minor = self.minor_in(&state, gpu)?;
        self.may_manage(&state)?;
        self.reap(&mut state)?;
        if !self.processes_in(&state, gpu)?.is_empty() {
            return Err(NodeError::InUse("processes use the GPU"));
        }
        let slot = gpu_state_mut(&mut state, gpu)?;
        let pending = slot.mig_pending;
        slot.lost = 0;
        clear_instances(slot);
        let sight = self.sight();
        for gi in (0_u32..).take(MAX_GIS) {
            sight.remove_capability(gi_capability_minor(minor, gi));
            for ci in (0_u32..).take(MAX_CIS) {
                sight.remove_capability(ci_capability_minor(minor, gi, ci));
            }
        }
        self.bring(&mut state, gpu, pending)
    }

    /// Brings a MIG mode into force.
    fn bring(&self, state: &mut Locked<'_>, gpu: usize, mode: u32) -> Result<(), NodeError> {
        let slot = gpu_state_mut(state, gpu)?;
        if std::mem::replace(&mut slot.mig_current, mode) == mode || !self.spec.renumber_on_mig_switch {
            return Ok(());
        }
        let taken = self.numbered(state)?;
        let free = (0..).find(|minor| taken.iter().all(|gpu| gpu.minor != *minor)).unwrap_or(0);
        gpu_state_mut(state, gpu)?.moved = free + 1;
        root::number(&self.dir, &self.numbered(state)?)
    }

    /// The GPUs with the minor numbers that they have now.
    fn numbered(&self, state: &State) -> Result<Vec<Gpu>, NodeError> {
        let now = |gpu: &Gpu| Ok(Gpu { minor: self.minor_in(state, gpu.index)?, ..gpu.clone() });
        self.gpus.iter().map(now).collect()
    }

    /// Minor number of a GPU's device node now: a change of its MIG mode may have changed it
    /// ([`crate::NodeSpec::renumber_on_mig_switch`]).
    pub fn minor(&self, gpu: usize) -> Result<u32, NodeError> {
        self.minor_in(&*self.lock()?, gpu)
    }

    fn minor_in(&self, state: &State, gpu: usize) -> Result<u32, NodeError> {
        let moved = gpu_state(state, gpu)?.moved.checked_sub(1);
        Ok(moved.unwrap_or(self.gpu(gpu)?.minor))
    }

    /// How many more instances of a profile could be created now.
    pub fn gi_remaining(&self, gpu: usize, profile_id: u32) -> Result<u32, NodeError> {
        let board = self.mig_board(gpu)?;
        let profile = board.profile_by_id(profile_id).ok_or(NodeError::InvalidArgument("no such profile"))?;
        let state = self.lock()?;
        let gpu = gpu_state(&state, gpu)?;
        enabled(gpu)?;
        let free_starts = profile.starts.iter().filter(|&&s| is_free(gpu, s, profile.size)).count();
        let used = instances_of(gpu, profile.id);
        let mut engines = engines_in_use(board, gpu);
        let mut fitting = 0;
        while engines.plus(profile.engines).fits_in(board.engines) && (fitting as usize) < free_starts {
            engines = engines.plus(profile.engines);
            fitting += 1;
        }
        Ok(fitting.min(profile.max.saturating_sub(used)))
    }

    /// Creates a GPU instance, at `start` or where the driver would put it (the highest legal free start).
    pub fn create_gi(&self, gpu: usize, profile_id: u32, start: Option<u32>) -> Result<GiInfo, NodeError> {
        let board = self.mig_board(gpu)?;
        let profile = board.profile_by_id(profile_id).ok_or(NodeError::InvalidArgument("no such profile"))?;
        if start.is_some_and(|s| !profile.allows_start(s)) {
            return Err(NodeError::InvalidArgument("the profile cannot start there"));
        }
        let mut state = self.lock()?;
        self.may_manage(&state)?;
        let place = gpu_state(&state, gpu)?;
        enabled(place)?;
        let start = match start {
            Some(start) => Some(start).filter(|&s| is_free(place, s, profile.size)),
            None => profile.starts.iter().rev().copied().find(|&s| is_free(place, s, profile.size)),
        }
        .ok_or(NodeError::InsufficientResources("no free placement"))?;
        if instances_of(place, profile.id) >= profile.max {
            return Err(NodeError::InsufficientResources("no more instances of this profile"));
        }
        if !engines_in_use(board, place).plus(profile.engines).fits_in(board.engines) {
            return Err(NodeError::InsufficientResources("its engines are taken"));
        }
        let (first, count) = board.instance_ids(profile.size);
        let place = gpu_state_mut(&mut state, gpu)?;
        let (id, slot) = (0_u32..)
            .zip(place.gis.iter_mut())
            .skip(first as usize)
            .take(count as usize)
            .find(|(_, gi)| gi.in_use == 0)
            .ok_or(NodeError::InsufficientResources("no free instance id"))?;
        let serial = slot.serial + 1;
        *slot = GiState {
            in_use: 1,
            profile: profile.id,
            start,
            size: profile.size,
            serial,
            cis: [CiState::NONE; MAX_CIS],
        };
        self.sight().make_capability(gi_capability_minor(self.minor_in(&state, gpu)?, id));
        Ok(GiInfo { gpu, id, serial, profile, start, size: profile.size })
    }

    /// The GPU instances of a GPU, by id.
    pub fn gis(&self, gpu: usize) -> Result<Vec<GiInfo>, NodeError> {
        let board = self.mig_board(gpu)?;
        let state = self.lock()?;
        Ok(gis_in(board, gpu, gpu_state(&state, gpu)?))
    }

    /// Destroys a GPU instance. `serial` guards against a handle from before.
    pub fn destroy_gi(&self, gpu: usize, id: u32, serial: u64) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        self.may_manage(&state)?;
        self.reap(&mut state)?;
        let busy = self.processes_in(&state, gpu)?.iter().any(|p| p.pool == Pool::instance(gpu, id));
        let gi = gi_state_mut(&mut state, gpu, id, serial)?;
        if gi.cis.iter().any(|ci| ci.in_use == 1) {
            return Err(NodeError::InUse("compute instances are in it"));
        }
        if busy {
            return Err(NodeError::InUse("processes use it"));
        }
        gi.in_use = 0;
        self.sight().remove_capability(gi_capability_minor(self.minor_in(&state, gpu)?, id));
        Ok(())
    }

    /// How many more compute instances of a profile could be created in a GPU instance.
    pub fn ci_remaining(&self, gpu: usize, gi: u32, serial: u64, profile_id: u32) -> Result<u32, NodeError> {
        let mut state = self.lock()?;
        let profile = self.ci_profile(&state, gpu, gi, profile_id)?;
        let gi = gi_state_mut(&mut state, gpu, gi, serial)?;
        let free = profile.starts.iter().filter(|&&s| ci_is_free(gi, s, profile.slices)).count();
        Ok(u32::try_from(free).unwrap_or(0))
    }

    /// Creates a compute instance, at `start` or at the lowest free one.
    pub fn create_ci(
        &self,
        gpu: usize,
        gi: u32,
        serial: u64,
        profile_id: u32,
        start: Option<u32>,
    ) -> Result<CiInfo, NodeError> {
        let mut state = self.lock()?;
        self.may_manage(&state)?;
        let profile = self.ci_profile(&state, gpu, gi, profile_id)?;
        if start.is_some_and(|s| !profile.starts.contains(&s)) {
            return Err(NodeError::InvalidArgument("the profile cannot start there"));
        }
        let place = gi_state_mut(&mut state, gpu, gi, serial)?;
        let start = match start {
            Some(start) => Some(start).filter(|&s| ci_is_free(place, s, profile.slices)),
            None => profile.starts.iter().copied().find(|&s| ci_is_free(place, s, profile.slices)),
        }
        .ok_or(NodeError::InsufficientResources("no free compute slices"))?;
        let (id, slot) = (0_u32..)
            .zip(place.cis.iter_mut())
            .find(|(_, ci)| ci.in_use == 0)
            .ok_or(NodeError::InsufficientResources("no free instance id"))?;
        *slot = CiState { in_use: 1, profile: profile.id, start, size: profile.slices };
        self.sight().make_capability(ci_capability_minor(self.minor_in(&state, gpu)?, gi, id));
        Ok(CiInfo { gpu, gi, gi_serial: serial, id, profile, start, size: profile.slices })
    }

    /// The compute instances of a GPU instance, by id.
    pub fn cis(&self, gpu: usize, gi: u32, serial: u64) -> Result<Vec<CiInfo>, NodeError> {
        let mut state = self.lock()?;
        let profile = self.gi_profile(&state, gpu, gi)?;
        Ok(cis_in(gpu, gi, profile, gi_state_mut(&mut state, gpu, gi, serial)?))
    }

    /// Destroys a compute instance.
    pub fn destroy_ci(&self, gpu: usize, gi: u32, serial: u64, id: u32) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        self.may_manage(&state)?;
        self.reap(&mut state)?;
        let pool = Pool::instance(gpu, gi);
        let busy = self.processes_in(&state, gpu)?.iter().any(|p| p.pool == pool && p.ci == Some(id));
        let ci = gi_state_mut(&mut state, gpu, gi, serial)?
            .cis
            .get_mut(id as usize)
            .filter(|ci| ci.in_use == 1)
            .ok_or(NodeError::NotFound("no such compute instance"))?;
        if busy {
            return Err(NodeError::InUse("processes use it"));
        }
        ci.in_use = 0;
        self.sight().remove_capability(ci_capability_minor(self.minor_in(&state, gpu)?, gi, id));
        Ok(())
    }

    /// The MIG devices of a GPU, in NVML's order (GPU instance id, then compute instance id).
    pub fn mig_devices(&self, gpu: usize) -> Result<Vec<MigDevice>, NodeError> {
        let parent = self.gpu(gpu)?;
        let state = self.lock()?;
        let place = gpu_state(&state, gpu)?;
        let mut devices = Vec::new();
        for gi in gis_in(parent.board, gpu, place) {
            let Some(slot) = place.gis.get(gi.id as usize) else { continue };
            for ci in cis_in(gpu, gi.id, gi.profile, slot) {
                let whole = ci.size == gi.profile.slices;
                devices.push(MigDevice {
                    multiprocessors: if whole {
                        gi.profile.multiprocessors
                    } else {
                        gi.profile.slice_multiprocessors * ci.size
                    },
                    name: if whole {
                        gi.profile.name.to_owned()
                    } else {
                        format!("{}c.{}", ci.size, gi.profile.name)
                    },
                    uuid: self.spec.mig_uuid(parent.identity, gi.id, ci.id),
                    ci,
                    gi,
                });
            }
        }
        Ok(devices)
    }

    /// The MIG device with this UUID.
    pub fn mig_device_by_uuid(&self, uuid: &str) -> Result<MigDevice, NodeError> {
        for gpu in &self.gpus {
            if let Some(found) = self.mig_devices(gpu.index)?.into_iter().find(|d| d.uuid == uuid) {
                return Ok(found);
            }
        }
        Err(NodeError::NotFound("no MIG device has this UUID"))
    }

    fn mig_board(&self, gpu: usize) -> Result<&'static Board, NodeError> {
        let board = self.gpu(gpu)?.board;
        if board.has_mig() { Ok(board) } else { Err(NodeError::NotSupported("the board has no MIG")) }
    }

    fn ci_profile(
        &self,
        state: &State,
        gpu: usize,
        gi: u32,
        id: u32,
    ) -> Result<&'static CiProfile, NodeError> {
        let slices = self.gi_profile(state, gpu, gi)?.slices;
        ci_profiles(slices).iter().find(|p| p.id == id).ok_or(NodeError::InvalidArgument("no such profile"))
    }

    /// MIG management and resets are root's, and on request not a container's.
    fn may_manage(&self, state: &Locked<'_>) -> Result<(), NodeError> {
        if state.deny_mig_in_containers == 1 && state.host_pid_namespace != pid_namespace() {
            return Err(NodeError::NoPermission("this is a container"));
        }
        Ok(())
    }
}

impl CiState {
    pub(crate) const NONE: Self = Self { in_use: 0, profile: 0, start: 0, size: 0 };
}

fn gpu_state(state: &State, gpu: usize) -> Result<&GpuState, NodeError> {
    state.gpus.get(gpu).ok_or(NodeError::NotFound("no GPU has this index"))
}

fn gpu_state_mut<'a>(state: &'a mut Locked<'_>, gpu: usize) -> Result<&'a mut GpuState, NodeError> {
    state.gpus.get_mut(gpu).ok_or(NodeError::NotFound("no GPU has this index"))
}

fn gi_state_mut<'a>(
    state: &'a mut Locked<'_>,
    gpu: usize,
    id: u32,
    serial: u64,
) -> Result<&'a mut GiState, NodeError> {
    gpu_state_mut(state, gpu)?
        .gis
        .get_mut(id as usize)
        .filter(|gi| gi.in_use == 1 && gi.serial == serial)
        .ok_or(NodeError::NotFound("no such GPU instance"))
}

fn enabled(gpu: &GpuState) -> Result<(), NodeError> {
    if gpu.mig_current == 1 { Ok(()) } else { Err(NodeError::NotSupported("MIG mode is off")) }
}

fn is_free(gpu: &GpuState, start: u32, size: u32) -> bool {
    gpu.gis
        .iter()
        .filter(|gi| gi.in_use == 1)
        .all(|gi| start + size <= gi.start || gi.start + gi.size <= start)
}

fn ci_is_free(gi: &GiState, start: u32, size: u32) -> bool {
    gi.cis
        .iter()
        .filter(|ci| ci.in_use == 1)
        .all(|ci| start + size <= ci.start || ci.start + ci.size <= start)
}

fn instances_of(gpu: &GpuState, profile: u32) -> u32 {
    let count = gpu.gis.iter().filter(|gi| gi.in_use == 1 && gi.profile == profile).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn engines_in_use(board: &Board, gpu: &GpuState) -> Engines {
    gpu.gis
        .iter()
        .filter(|gi| gi.in_use == 1)
        .filter_map(|gi| board.profile_by_id(gi.profile))
        .fold(Engines::default(), |sum, profile| sum.plus(profile.engines))
}

fn gis_in(board: &Board, gpu: usize, state: &GpuState) -> Vec<GiInfo> {
    (0_u32..)
        .zip(&state.gis)
        .filter(|(_, gi)| gi.in_use == 1)
        .filter_map(|(id, gi)| {
            let profile = board.profile_by_id(gi.profile)?;
            Some(GiInfo { gpu, id, serial: gi.serial, profile, start: gi.start, size: gi.size })
        })
        .collect()
}

fn cis_in(gpu: usize, gi: u32, profile: &GiProfile, state: &GiState) -> Vec<CiInfo> {
    (0_u32..)
        .zip(&state.cis)
        .filter(|(_, ci)| ci.in_use == 1)
        .filter_map(|(id, ci)| {
            let profile = ci_profiles(profile.slices).iter().find(|p| p.id == ci.profile)?;
            Some(CiInfo { gpu, gi, gi_serial: state.serial, id, profile, start: ci.start, size: ci.size })
        })
        .collect()
}

/// Removes all instances; serials stay, so that old handles stay invalid.
pub(crate) fn clear_instances(gpu: &mut GpuState) {
    for gi in &mut gpu.gis {
        gi.in_use = 0;
        gi.cis = [CiState::NONE; MAX_CIS];
    }
}
