//! What a board is: the numbers that a real driver would read out of the silicon.
//!
//! The tables themselves are in [`crate::tables`]. Nothing here has state.

/// A MiB in bytes.
pub const MIB: u64 = 1 << 20;

/// Generation of the die; the values are NVML's (`NVML_DEVICE_ARCH_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Architecture {
    /// T4.
    Turing = 6,
    /// A30, A100.
    Ampere = 7,
    /// L40S.
    Ada = 8,
    /// H100, H200.
    Hopper = 9,
    /// B200, RTX PRO 6000.
    Blackwell = 10,
}

/// Engines beside the multiprocessors, of a board or of a GPU-instance profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Engines {
    /// Copy engines.
    pub copy: u32,
    /// Video decoders.
    pub decoder: u32,
    /// Video encoders.
    pub encoder: u32,
    /// JPEG engines.
    pub jpeg: u32,
    /// Optical-flow engines.
    pub ofa: u32,
}

impl Engines {
    /// The sum, engine by engine.
    pub fn plus(self, other: Self) -> Self {
        Self {
            copy: self.copy + other.copy,
            decoder: self.decoder + other.decoder,
            encoder: self.encoder + other.encoder,
            jpeg: self.jpeg + other.jpeg,
            ofa: self.ofa + other.ofa,
        }
    }

    /// Whether `total` has at least this many of every engine.
    pub fn fits_in(self, total: Self) -> bool {
        self.copy <= total.copy
            && self.decoder <= total.decoder
            && self.encoder <= total.encoder
            && self.jpeg <= total.jpeg
            && self.ofa <= total.ofa
    }
}

/// One GPU-instance profile of a board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GiProfile {
    /// Name without the leading `MIG `, as in `1g.10gb+me`.
    pub name: &'static str,
    /// The id that `nvidia-smi mig -lgip` prints and that `nvmlDeviceCreateGpuInstance` takes.
    pub id: u32,
    /// NVML's enumeration (`NVML_GPU_INSTANCE_PROFILE_*`), the argument of the profile-info calls.
    pub nvml: u32,
    /// Compute slices.
    pub slices: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Legal starts on the memory-slice axis.
    pub starts: &'static [u32],
    /// Length on the memory-slice axis.
    pub size: u32,
    /// Most instances of this profile at one time.
    pub max: u32,
    /// Engines that an instance takes.
    pub engines: Engines,
    /// Whether graphics APIs work in it.
    pub graphics: bool,
    /// Whether peer-to-peer access works in it.
    pub p2p: bool,
    /// Multiprocessors of one compute slice inside this instance.
    pub slice_multiprocessors: u32,
}

impl GiProfile {
    /// Memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib * MIB
    }

    /// Whether an instance of this profile may start at `start`.
    pub fn allows_start(&self, start: u32) -> bool {
        self.starts.contains(&start)
    }
}

/// One compute-instance profile; which ones an instance offers follows from its slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CiProfile {
    /// The id of `nvidia-smi mig -lcip`; equal to NVML's enumeration.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// Legal starts inside the GPU instance.
    pub starts: &'static [u32],
}

/// A board: everything that does not change while a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Board {
    /// The name in a [`crate::NodeSpec`], such as `H100-80`.
    pub key: &'static str,
    /// The marketing name that NVML reports.
    pub product: &'static str,
    /// Die generation.
    pub architecture: Architecture,
    /// NVML's brand number.
    pub brand: u32,
    /// CUDA compute capability.
    pub compute_capability: (u32, u32),
    /// Multiprocessors of the whole GPU with MIG off.
    pub multiprocessors: u32,
    /// CUDA cores of one multiprocessor.
    pub cores_per_multiprocessor: u32,
    /// Total memory in MiB, as `nvidia-smi` prints it.
    pub memory_mib: u64,
    /// Memory that the driver keeps for itself, in MiB; part of the total.
    pub reserved_mib: u64,
    /// Width of the memory bus in bits.
    pub memory_bus_width: u32,
    /// Highest clock of the multiprocessors in MHz.
    pub sm_clock_mhz: u32,
    /// Highest memory clock in MHz.
    pub memory_clock_mhz: u32,
    /// Power limit in milliwatts.
    pub power_limit_mw: u32,
    /// PCI device and vendor id, as in NVML's `pciDeviceId`.
    pub pci_device_id: u32,
    /// PCI subsystem id.
    pub pci_subsystem_id: u32,
    /// Highest PCIe generation and width.
    pub pcie: (u32, u32),
    /// NVLinks of the board; 0 where it has none.
    pub nvlinks: u32,
    /// Engines of the whole GPU.
    pub engines: Engines,
    /// Width of the memory-slice axis; 0 where the board has no MIG.
    pub axis: u32,
    /// GPU-instance profiles; empty where the board has no MIG.
    pub profiles: &'static [GiProfile],
    /// Whether a change of the MIG mode waits for a GPU reset (Ampere).
    pub mig_needs_reset: bool,
    /// Whether the MIG mode outlives a reboot (Ampere keeps it in the InfoROM).
    pub mig_survives_reboot: bool,
}

impl Board {
    /// Whether the board has MIG at all.
    pub fn has_mig(&self) -> bool {
        !self.profiles.is_empty()
    }

    /// Total memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib * MIB
    }

    /// Bytes that the driver keeps for itself.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_mib * MIB
    }

    /// The profile with this `lgip` id.
    pub fn profile_by_id(&self, id: u32) -> Option<&'static GiProfile> {
        self.profiles.iter().find(|p| p.id == id)
    }

    /// The profile with this number in NVML's enumeration.
    pub fn profile_by_nvml(&self, nvml: u32) -> Option<&'static GiProfile> {
        self.profiles.iter().find(|p| p.nvml == nvml)
    }

    /// The profile with this name, with or without a leading `MIG `.
    pub fn profile_by_name(&self, name: &str) -> Option<&'static GiProfile> {
        let name = name.strip_prefix("MIG ").unwrap_or(name);
        self.profiles.iter().find(|p| p.name == name)
    }

    /// Most MIG devices that the board can have at one time.
    pub fn max_mig_devices(&self) -> u32 {
        self.profiles.iter().map(|p| p.slices).max().unwrap_or(0)
    }

    /// Instance ids that a profile of `size` memory slices may get: first id and how many.
    ///
    /// Ids are numbered like the nodes of a tree that halves the axis: the whole axis is 0, halves 1
    /// and 2, quarters 3 to 6, eighths 7 to 14.
    pub fn instance_ids(&self, size: u32) -> (u32, u32) {
        let parts = self.axis.checked_div(size).unwrap_or(1).max(1);
        (parts - 1, parts)
    }
}

/// The compute-instance profiles of a GPU instance with `slices` compute slices.
pub fn ci_profiles(slices: u32) -> &'static [CiProfile] {
    const fn ci(id: u32, slices: u32, starts: &'static [u32]) -> CiProfile {
        CiProfile { id, slices, starts }
    }
    const ONE: &[CiProfile] = &[ci(0, 1, &[0])];
    const TWO: &[CiProfile] = &[ci(0, 1, &[0, 1]), ci(1, 2, &[0])];
    const THREE: &[CiProfile] = &[ci(0, 1, &[0, 1, 2]), ci(1, 2, &[0]), ci(2, 3, &[0])];
    const FOUR: &[CiProfile] = &[ci(0, 1, &[0, 1, 2, 3]), ci(1, 2, &[0, 2]), ci(3, 4, &[0])];
    const SEVEN: &[CiProfile] = &[
        ci(0, 1, &[0, 1, 2, 3, 4, 5, 6]),
        ci(1, 2, &[0, 2, 4]),
        ci(2, 3, &[0, 4]),
        ci(3, 4, &[0]),
        ci(4, 7, &[0]),
    ];
    match slices {
        1 => ONE,
        2 => TWO,
        3 => THREE,
        4 => FOUR,
        7 => SEVEN,
        _ => &[],
    }
}
