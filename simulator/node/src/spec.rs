//! What a node is made of: the content of `node.json`, and what follows from it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::artifact::{CUDA_LIBRARY, NVML_LIBRARY, built_library};
use crate::board::Board;
use crate::error::NodeError;
use crate::layout::{MAX_CIS, MAX_GIS, MAX_GPUS};
use crate::tables;

/// How NVML names the processes that use a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessView {
    /// Pids as the host sees them, whoever asks.
    #[default]
    Host,
    /// Pids as the asking process sees them; processes outside its pid namespace are not listed.
    Own,
    /// Always an empty list.
    Empty,
    /// Listed, with a used memory of `NVML_VALUE_NOT_AVAILABLE`.
    NotAvailable,
}

/// Where the NVLinks of a node's GPUs lead. Boards without links have none, and links lead to equal boards only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NvLinks {
    /// From each GPU to all others.
    #[default]
    Mesh,
    /// Over bridges, from GPU to GPU two by two: the first and the second, the third and the fourth.
    Pairs,
    /// To NVSwitches.
    Switches,
}

impl NvLinks {
    const fn is_mesh(&self) -> bool {
        matches!(self, Self::Mesh)
    }
}

/// One GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuSpec {
    /// Key of a board, such as `H100-80`.
    pub board: String,
    /// Whether MIG mode is on when the node is created.
    #[serde(default)]
    pub mig: bool,
    /// Memory to use instead of the board's, in MiB; only for boards with MIG off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// NUMA node; by default the first half of the GPUs is on 0 and the second on 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<i32>,
    /// Minor number; by default the position in the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// What its UUIDs and serial number are made of; by default the minor number. It stays when the driver numbers the
    /// GPUs anew ([`NodeSpec::renumbered`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<u32>,
}

impl GpuSpec {
    /// A GPU of this board with MIG off.
    pub fn new(board: impl Into<String>) -> Self {
        Self {
            board: board.into(),
            mig: false,
            memory_mib: None,
            numa_node: None,
            minor: None,
            identity: None,
        }
    }

    /// The same with MIG mode on.
    pub fn with_mig(mut self) -> Self {
        self.mig = true;
        self
    }
}

/// Everything that [`crate::create`] needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSpec {
    /// Source of all UUIDs and serial numbers: equal seeds give equal ones.
    #[serde(default = "default_seed")]
    pub seed: String,
    /// The GPUs, in the order of their PCI addresses.
    pub gpus: Vec<GpuSpec>,
    /// Driver version.
    #[serde(default = "default_driver_version")]
    pub driver_version: String,
    /// CUDA version of the driver as `cuDriverGetVersion` has it (13000 is 13.0).
    #[serde(default = "default_cuda_version")]
    pub cuda_version: i32,
    /// How long a killed process's memory stays in use, in milliseconds.
    #[serde(default)]
    pub reap_delay_ms: u64,
    /// How NVML names processes.
    #[serde(default)]
    pub process_view: ProcessView,
    /// Whether MIG management is refused (`NO_PERMISSION`) outside the pid namespace that created the node.
    #[serde(default)]
    pub deny_mig_in_containers: bool,
    /// Overrides, for all GPUs, whether the MIG mode outlives a reboot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_survives_reboot: Option<bool>,
    /// Whether the module nvidia-uvm is absent after a start, until [`crate::Node::load_uvm`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late_uvm: bool,
    /// Whether the kernel gave the modules that choose no major number themselves another one than at first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub other_majors: bool,
    /// Whether a GPU leaves the driver when its MIG mode changes, and comes back under the lowest minor number that was
    /// free meanwhile.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub renumber_on_mig_switch: bool,
    /// Where the NVLinks of the GPUs lead.
    #[serde(default, skip_serializing_if = "NvLinks::is_mesh")]
    pub nvlinks: NvLinks,
    /// Settings of the CUDA driver, as lines of `cuda.conf`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cuda_settings: Vec<String>,
    /// Library files to copy into the driver root: the built `libnvidia-ml.so.1` stand-in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvml_library: Option<PathBuf>,
    /// The built `libcuda.so.1` stand-in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_library: Option<PathBuf>,
    /// A program to install as `nvidia-smi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvidia_smi: Option<PathBuf>,
}

fn default_seed() -> String {
    "aliquot".to_owned()
}

fn default_driver_version() -> String {
    "580.95.05".to_owned()
}

const fn default_cuda_version() -> i32 {
    13000
}

impl NodeSpec {
    /// Writes `node.json`, aside and renamed, so that who opens the node sees the old one or the new one.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), NodeError> {
        let text = serde_json::to_string_pretty(self).map_err(|e| NodeError::Spec(e.to_string()))?;
        let (path, aside) = (dir.join("node.json"), dir.join(".node.json.new"));
        fs::write(&aside, text)
            .and_then(|()| fs::set_permissions(&aside, fs::Permissions::from_mode(0o644)))
            .and_then(|()| fs::rename(&aside, &path))
            .map_err(|source| NodeError::Io { what: "could not write", path, source })
    }

    /// A node of these boards, with every other setting at its default.
    pub fn new<S: Into<String>>(boards: impl IntoIterator<Item = S>) -> Self {
        Self {
            seed: default_seed(),
            gpus: boards.into_iter().map(GpuSpec::new).collect(),
            driver_version: default_driver_version(),
            cuda_version: default_cuda_version(),
            reap_delay_ms: 0,
            process_view: ProcessView::default(),
            deny_mig_in_containers: false,
            mig_survives_reboot: None,
            late_uvm: false,
            other_majors: false,
            renumber_on_mig_switch: false,
            nvlinks: NvLinks::default(),
            cuda_settings: Vec::new(),
            nvml_library: None,
            cuda_library: None,
            nvidia_smi: None,
        }
    }

    /// The same with another seed.
    pub fn with_seed(mut self, seed: impl Into<String>) -> Self {
        self.seed = seed.into();
        self
    }

    /// The same with the libraries that cargo built beside the running program, where none are named.
    pub fn with_built_libraries(mut self) -> Self {
        self.nvml_library = self.nvml_library.or_else(|| built_library(NVML_LIBRARY));
        self.cuda_library = self.cuda_library.or_else(|| built_library(CUDA_LIBRARY));
        self
    }

    /// The same node after its driver was loaded anew and numbers everything otherwise: the minor numbers are given
    /// out in reverse order, and the major numbers of `nvidia-caps` and `nvidia-uvm` are exchanged. The GPUs stay what
    /// and where they are.
    pub fn renumbered(&self) -> Result<Self, NodeError> {
        let gpus = self.resolve()?;
        let mut renumbered = self.clone();
        renumbered.other_majors = !self.other_majors;
        for (spec, (gpu, other)) in renumbered.gpus.iter_mut().zip(gpus.iter().zip(gpus.iter().rev())) {
            spec.minor = Some(other.minor);
            spec.identity = Some(gpu.identity);
        }
        Ok(renumbered)
    }

    /// The GPUs with everything that follows from the specification.
    pub fn resolve(&self) -> Result<Vec<Gpu>, NodeError> {
        if self.gpus.is_empty() || self.gpus.len() > MAX_GPUS {
            return Err(NodeError::Spec(format!("a node has 1 to {MAX_GPUS} GPUs, not {}", self.gpus.len())));
        }
        let half = self.gpus.len().div_ceil(2);
        let mut gpus = Vec::with_capacity(self.gpus.len());
        for (index, spec) in self.gpus.iter().enumerate() {
            let board = tables::board(&spec.board).ok_or_else(|| {
                let known: Vec<_> = tables::BOARDS.iter().map(|b| b.key).collect();
                NodeError::Spec(format!(
                    "GPU {index}: no board {:?}; known are {}",
                    spec.board,
                    known.join(", ")
                ))
            })?;
            if spec.mig && !board.has_mig() {
                return Err(NodeError::Spec(format!("GPU {index}: {} has no MIG", board.key)));
            }
            if spec.memory_mib.is_some() && board.has_mig() {
                return Err(NodeError::Spec(format!(
                    "GPU {index}: memoryMib cannot be set on {}, its MIG table fixes the memory",
                    board.key
                )));
            }
            let ordinal = u32::try_from(index).unwrap_or(u32::MAX);
            let minor = spec.minor.unwrap_or(ordinal);
            if gpus.iter().any(|g: &Gpu| g.minor == minor) {
                return Err(NodeError::Spec(format!("GPU {index}: minor number {minor} is taken")));
            }
            let identity = spec.identity.unwrap_or(minor);
            if gpus.iter().any(|g: &Gpu| g.identity == identity) {
                return Err(NodeError::Spec(format!("GPU {index}: identity {identity} is taken")));
            }
            gpus.push(Gpu {
                index,
                minor,
                identity,
                board,
                uuid: format!("GPU-{}", uuid_of(&self.seed, &format!("gpu {identity}"))),
                // Two buses apart, as on HGX boards: 0x0f, 0x2f, 0x4f …
                bus: 0x0f + ordinal * 0x10,
                serial: format!(
                    "16{:011}",
                    hash(&[&self.seed, &format!("serial {identity}")]) % 100_000_000_000
                ),
                numa_node: spec.numa_node.unwrap_or_else(|| i32::from(index >= half)),
                memory_mib: spec.memory_mib.unwrap_or(board.memory_mib),
                mig_at_creation: spec.mig,
            });
        }
        Ok(gpus)
    }

    /// UUID of the MIG device that a compute instance of the GPU with this identity is.
    pub fn mig_uuid(&self, identity: u32, gi: u32, ci: u32) -> String {
        format!("MIG-{}", uuid_of(&self.seed, &format!("mig {identity} {gi} {ci}")))
    }
}

/// One GPU of an open node: its board and its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Position on the node, NVML's index.
    pub index: usize,
    /// Minor number of its device node since the driver was loaded; what it is now says [`crate::Node::minor`].
    pub minor: u32,
    /// What its UUID and serial number are made of.
    pub identity: u32,
    /// Its board.
    pub board: &'static Board,
    /// `GPU-…`.
    pub uuid: String,
    /// PCI bus number; domain, device and function are 0.
    pub bus: u32,
    /// Serial number of the board.
    pub serial: String,
    /// NUMA node of its PCI slot.
    pub numa_node: i32,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// MIG mode that the node was created with.
    pub mig_at_creation: bool,
}

impl Gpu {
    /// PCI address as the kernel writes it, `0000:0f:00.0`.
    pub fn bdf(&self) -> String {
        format!("0000:{:02x}:00.0", self.bus)
    }

    /// PCI address as NVML writes it, `00000000:0F:00.0`.
    pub fn nvml_bus_id(&self) -> String {
        format!("00000000:{:02X}:00.0", self.bus)
    }

    /// Total memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib * crate::board::MIB
    }
}

/// Minor number of the capability node of a GPU instance, by NVIDIA's numbering.
///
/// 1 is `config`, 2 is `monitor`; from 3 on every GPU has 15 GPU instances, each followed by its 8
/// compute instances.
pub fn gi_capability_minor(gpu_minor: u32, gi: u32) -> u32 {
    let (gis, cis) = (u32::try_from(MAX_GIS).unwrap_or(15), u32::try_from(MAX_CIS).unwrap_or(8));
    3 + gpu_minor * gis * (cis + 1) + gi * (cis + 1)
}

/// Minor number of the capability node of a compute instance.
pub fn ci_capability_minor(gpu_minor: u32, gi: u32, ci: u32) -> u32 {
    gi_capability_minor(gpu_minor, gi) + 1 + ci
}

fn hash(parts: &[&str]) -> u64 {
    // FNV-1a, then a finaliser, so that near inputs end far apart. Not for secrets.
    let mut h: u64 = 0xcbf2_9ce4_8422_2325;
    for part in parts {
        for byte in part.bytes().chain([0]) {
            h = (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

pub(crate) fn uuid_of(seed: &str, what: &str) -> String {
    // Version 5 (name-based) and the RFC variant, as the driver's own MIG UUIDs are.
    let high = (hash(&[seed, what, "high"]) & !0xf000) | 0x5000;
    let low = (hash(&[seed, what, "low"]) & !(0xc << 60)) | (0x8 << 60);
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_minors_follow_nvidias_numbering() {
        assert_eq!(gi_capability_minor(0, 0), 3);
        assert_eq!(ci_capability_minor(0, 0, 0), 4);
        assert_eq!(gi_capability_minor(0, 1), 12);
        assert_eq!(ci_capability_minor(0, 14, 7), 137);
        assert_eq!(gi_capability_minor(1, 0), 138);
    }

    #[test]
    fn uuids_differ_by_seed_and_subject_and_are_stable() {
        let a = NodeSpec::new(["A30"]).with_seed("a");
        let b = NodeSpec::new(["A30"]).with_seed("b");
        assert_eq!(a.mig_uuid(0, 1, 0), a.mig_uuid(0, 1, 0));
        assert_ne!(a.mig_uuid(0, 1, 0), b.mig_uuid(0, 1, 0));
        assert_ne!(a.mig_uuid(0, 1, 0), a.mig_uuid(0, 1, 1));
        assert_ne!(a.mig_uuid(1, 1, 0), a.mig_uuid(0, 1, 1));
        assert_eq!(a.mig_uuid(0, 1, 0).len(), 40);
    }

    #[test]
    fn renumbered_gpus_are_the_same_ones_under_numbers_in_reverse_order() {
        let of = |spec: &NodeSpec| -> Vec<_> {
            let gpus = spec.resolve().unwrap();
            gpus.into_iter().map(|gpu| (gpu.minor, gpu.uuid, gpu.serial, gpu.bus)).collect()
        };
        let before = NodeSpec::new(["A30", "T4", "T4"]);
        let after = before.renumbered().unwrap();
        let (then, now) = (of(&before), of(&after));
        assert_eq!(now.iter().map(|gpu| gpu.0).collect::<Vec<_>>(), [2, 1, 0]);
        for (then, now) in then.iter().zip(&now) {
            assert_eq!((&then.1, &then.2, then.3), (&now.1, &now.2, now.3));
        }
        assert!(after.other_majors);
        let back = after.renumbered().unwrap();
        assert_eq!((of(&back), back.other_majors), (then, false));
    }

    #[test]
    fn a_board_that_does_not_exist_is_named() {
        let error = NodeSpec::new(["H101"]).resolve().unwrap_err();
        assert!(error.to_string().contains("H101"), "{error}");
        assert!(error.to_string().contains("H100-80"), "{error}");
    }

    #[test]
    fn mig_on_a_board_without_mig_is_refused() {
        let mut spec = NodeSpec::new(["T4"]);
        spec.gpus[0].mig = true;
        assert!(spec.resolve().is_err());
    }
}
