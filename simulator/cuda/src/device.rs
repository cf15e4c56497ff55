//! A device as the driver describes it.

use aliquot_sim_node::compute::domain_key;
use aliquot_sim_node::{Gpu, MigDevice, Node, Pool, Sight};

use crate::codes::{Code, Cu};
use crate::visible::{Candidate, choose};

/// An enumerated device: a GPU or a MIG device.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) gpu: Gpu,
    pub(crate) mig: Option<MigDevice>,
    /// Where its memory is accounted.
    pub(crate) pool: Pool,
    /// Where its time is shared.
    pub(crate) domain: u64,
    pub(crate) multiprocessors: u32,
}

/// The devices of this process, in the driver's order.
///
/// # Errors
/// `NO_DEVICE` where the process can open none or the driver is not loaded, `UNKNOWN` without the device of nvidia-uvm or where the node's state
/// cannot be read.
pub(crate) fn enumerate(node: &Node) -> Cu<Vec<Device>> {
    let sight = node.sight();
    if node.module().is_none() || !sight.dev().join("nvidiactl").exists() {
        return Err(Code::NO_DEVICE);
    }
    if !sight.dev().join("nvidia-uvm").exists() {
        return Err(Code::UNKNOWN);
    }
    let mut candidates = Vec::new();
    for gpu in node.gpus() {
        if sight.gpu(minor(node, gpu)?) {
            candidates.push(candidate(node, gpu, &sight)?);
        }
    }
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let by_bus_id = std::env::var("CUDA_DEVICE_ORDER").is_ok_and(|order| order == "PCI_BUS_ID");
    let mut devices = Vec::new();
    for choice in choose(candidates, visible.as_deref(), by_bus_id) {
        let gpu = node.gpu(choice.gpu).map_err(|_| Code::UNKNOWN)?.clone();
        let mig = match choice.instance {
            None => None,
            Some(position) => {
                Some(accessible(node, &gpu, &sight)?.into_iter().nth(position).ok_or(Code::NO_DEVICE)?)
            }
        };
        devices.push(Device::new(gpu, mig));
    }
    if devices.is_empty() { Err(Code::NO_DEVICE) } else { Ok(devices) }
}

fn candidate(node: &Node, gpu: &Gpu, sight: &Sight) -> Cu<Candidate> {
    let mig = gpu.board.has_mig() && node.mig_mode(gpu.index).map_err(|_| Code::UNKNOWN)?.current;
    let instances = if mig {
        let devices = accessible(node, gpu, sight)?;
        Some(devices.into_iter().map(|d| (d.uuid, d.ci.gi, d.ci.id)).collect())
    } else {
        None
    };
    let speed = u64::from(gpu.board.multiprocessors) * u64::from(gpu.board.sm_clock_mhz);
    Ok(Candidate { gpu: gpu.index, uuid: gpu.uuid.clone(), instances, speed })
}

/// The MIG devices whose two capability nodes exist.
fn accessible(node: &Node, gpu: &Gpu, sight: &Sight) -> Cu<Vec<MigDevice>> {
    let devices = node.mig_devices(gpu.index).map_err(|_| Code::UNKNOWN)?;
    let minor = minor(node, gpu)?;
    Ok(devices.into_iter().filter(|d| sight.mig_device(minor, d.ci.gi, d.ci.id)).collect())
}

fn minor(node: &Node, gpu: &Gpu) -> Cu<u32> {
    node.minor(gpu.index).map_err(|_| Code::UNKNOWN)
}

impl Device {
    fn new(gpu: Gpu, mig: Option<MigDevice>) -> Self {
        let pool =
            mig.as_ref().map_or_else(|| Pool::whole(gpu.index), |m| Pool::instance(gpu.index, m.ci.gi));
        let domain = domain_key(gpu.index, mig.as_ref().map(|m| (m.ci.gi, m.ci.id)));
        let multiprocessors = mig.as_ref().map_or(gpu.board.multiprocessors, |m| m.multiprocessors);
        Self { gpu, mig, pool, domain, multiprocessors }
    }

    pub(crate) fn name(&self) -> String {
        let product = self.gpu.board.product;
        let product =
            if product.starts_with("NVIDIA") { product.to_owned() } else { format!("NVIDIA {product}") };
        match &self.mig {
            Some(mig) => format!("{product} MIG {}", mig.name),
            None => product,
        }
    }

    /// `uuid` of the GPU (v1), or of the MIG device where it is one (v2).
    pub(crate) fn uuid(&self, of_instance: bool) -> [u8; 16] {
        let text = match &self.mig {
            Some(mig) if of_instance => &mig.uuid,
            _ => &self.gpu.uuid,
        };
        let digits: Vec<u8> = text
            .split_once('-')
            .map_or("", |(_, rest)| rest)
            .bytes()
            .filter_map(|b| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok()))
            .collect();
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair.iter().fold(0, |sum, digit| sum * 16 + digit);
        }
        bytes
    }

    /// Compute capability as one number, 90 for 9.0.
    pub(crate) fn capability(&self) -> (i32, i32) {
        let (major, minor) = self.gpu.board.compute_capability;
        (i32::try_from(major).unwrap_or(0), i32::try_from(minor).unwrap_or(0))
    }

    /// A device attribute; `None` for a number that no header names.
    pub(crate) fn attribute(&self, attribute: i32, mps: bool) -> Option<i32> {
        let board = self.gpu.board;
        let (major, minor) = self.capability();
        let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let from = |capability: i32| i32::from(major >= capability);
        let threads = match (major, minor) {
            (7, 5) => 1024,
            (8, 6 | 9) | (12, _) => 1536,
            _ => 2048,
        };
        let shared = match (major, minor) {
            (7, _) => 64,
            (8, 0) => 164,
            (8, _) | (12, _) => 100,
            _ => 228,
        } << 10;
        Some(match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => 48 << 10,
            9 => 64 << 10,
            10 => 32,
            11 => i32::MAX,
            12 | 82 => 65536,
            13 => number(board.sm_clock_mhz * 1000),
            14 => 512,
            15 | 19 | 31 | 32 | 41 | 44 | 78..=80 | 83 | 89..=93 | 95 | 96 | 99 | 102 | 103 => 1,
            16 => number(self.multiprocessors),
            17 | 18 | 20 | 34 | 35 | 50 | 84 | 85 | 86 | 88 | 94 | 98 | 100 | 101 | 104 | 105 => 0,
            21 => 131_072,
            22 => 131_072,
            23 => 65536,
            24..=26 | 47..=49 => 16384,
            27 | 28 | 42 | 45 | 46 | 52..=59 | 61 | 63 | 64 | 66 | 67 | 73 | 74 | 77 => 32768,
            29 | 43 | 62 | 65 | 68 => 2048,
            30 => 512,
            33 => number(self.gpu.bus),
            36 => number(board.memory_clock_mhz * 1000),
            37 => number(board.memory_bus_width),
            38 => 50 << 20,
            39 => threads,
            40 => number(board.engines.copy.max(1)),
            51 => 32,
            60 => 16384,
            69 => 268_435_456,
            70 | 71 => 131_072,
            72 => 2_097_120,
            75 => major,
            76 => minor,
            81 => shared,
            87 => {
                if (major, minor) == (8, 0) || major == 9 || major == 10 {
                    2
                } else {
                    64
                }
            }
            97 => shared - 1024,
            106 => {
                if threads == 2048 {
                    32
                } else {
                    16
                }
            }
            107 | 110 | 116 | 124 => from(8),
            108 | 109 => {
                if major >= 8 {
                    32 << 20
                } else {
                    0
                }
            }
            111 => 1024,
            112..=115 | 121..=123 | 125 | 129 => 1,
            // Ordering and flush options as without GPUDirect RDMA drivers.
            117 | 118 => 0,
            // Pools can be exported as a file descriptor.
            119 => 1,
            120 | 127 | 132 => from(9),
            126 => 1,
            128 | 130 | 135..=138 => 0,
            131 | 134 => self.gpu.numa_node,
            133 => i32::from(mps),
            139 => i32::from_ne_bytes(board.pci_device_id.to_ne_bytes()),
            140 => i32::from_ne_bytes(board.pci_subsystem_id.to_ne_bytes()),
            141..=161 => 0,
            _ => return None,
        })
    }
}
