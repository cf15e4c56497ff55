//! How GPUs are connected to each other and to processors.

use std::ffi::{c_int, c_uint, c_ulong};

use aliquot_sim_node::{Architecture, Gpu};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out};
use crate::call::{Code, Done, Session, export};
use crate::device::pci_info;

/// Processors of one NUMA node.
const PROCESSORS_PER_NODE: usize = 32;
const WORD_BITS: usize = c_ulong::BITS as usize;

export! {
    fn nvmlDeviceGetCpuAffinity(device: Handle, words: c_uint, set: Out<c_ulong>) |session| {
        put_processors(session.parent(device)?, words, set)
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(
        device: Handle, words: c_uint, set: Out<c_ulong>, scope: c_uint,
    ) |session| {
        if scope > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        put_processors(session.parent(device)?, words, set)
    }

    fn nvmlDeviceGetMemoryAffinity(device: Handle, words: c_uint, set: Out<c_ulong>, scope: c_uint) |session| {
        if scope > 1 {
            return Err(Code::INVALID_ARGUMENT);
        }
        let node = usize::try_from(session.parent(device)?.numa_node).map_err(|_| Code::NOT_SUPPORTED)?;
        put_bits(words, set, node..node + 1)
    }

    fn nvmlDeviceGetNumaNodeId(device: Handle, _node: Out<c_uint>) |session| {
        // Only of GPUs whose memory is a NUMA node of the system; none of our boards is.
        session.parent(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(first: Handle, second: Handle, level: Out<c_uint>) |session| {
        let (first, second) = (session.gpu(first)?, session.gpu(second)?);
        level.put(if first.index == second.index {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL
        } else if first.numa_node == second.numa_node {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE
        } else {
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM
        })
    }

    fn nvmlDeviceGetP2PStatus(first: Handle, second: Handle, _index: c_uint, status: Out<c_uint>) |session| {
        let (first, second) = (session.gpu(first)?, session.gpu(second)?);
        status.put(if meshed(session, first)?.iter().any(|g| g.index == second.index) {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK
        } else {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED
        })
    }

    fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, active: Out<c_uint>) |session| {
        let gpu = linked(session, device, link)?;
        active.put((!meshed(session, gpu)?.is_empty()).into())
    }

    fn nvmlDeviceGetNvLinkVersion(device: Handle, link: c_uint, version: Out<c_uint>) |session| {
        version.put(match linked(session, device, link)?.board.architecture {
            Architecture::Turing => 2,
            Architecture::Ampere | Architecture::Ada => 3,
            Architecture::Hopper => 4,
            Architecture::Blackwell => 5,
        })
    }

    fn nvmlDeviceGetNvLinkCapability(
        device: Handle, link: c_uint, _capability: c_uint, result: Out<c_uint>,
    ) |session| {
        let gpu = linked(session, device, link)?;
        result.put((!meshed(session, gpu)?.is_empty()).into())
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, pci: Out<sys::nvmlPciInfo_t>) |session| {
        let peers = meshed(session, linked(session, device, link)?)?;
        // Links are dealt out to the peers in turn.
        let turn = (link as usize).checked_rem(peers.len()).ok_or(Code::NOT_SUPPORTED)?;
        pci.put(pci_info(peers.get(turn).ok_or(Code::NOT_SUPPORTED)?))
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: c_uint, kind: Out<c_uint>) |session| {
        linked(session, device, link)?;
        kind.put(match session.node.spec().nvswitch {
            true => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
            false => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
        })
    }

    fn nvmlDeviceGetGpuFabricInfo(device: Handle, info: Out<sys::nvmlGpuFabricInfo_t>) |session| {
        let gpu = session.gpu(device)?;
        // Boards before Hopper need no registration with the fabric.
        let registers = matches!(gpu.board.architecture, Architecture::Hopper | Architecture::Blackwell);
        let state = match session.node.spec().nvswitch && registers && gpu.board.nvlinks > 0 {
            true => sys::NVML_GPU_FABRIC_STATE_COMPLETED,
            false => sys::NVML_GPU_FABRIC_STATE_NOT_SUPPORTED,
        };
        let status = sys::nvmlReturn_enum_NVML_SUCCESS;
        info.put(sys::nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status, cliqueId: 0, state: state as sys::nvmlGpuFabricState_t })
    }

    fn nvmlDeviceOnSameBoard(first: Handle, second: Handle, same: Out<c_int>) |session| {
        same.put((session.gpu(first)?.index == session.gpu(second)?.index).into())
    }
}

/// The GPU of a handle, if it has this link.
fn linked(session: &Session, device: Handle, link: c_uint) -> Result<&Gpu, Code> {
    let gpu = session.gpu(device)?;
    if link >= sys::NVML_NVLINK_MAX_LINKS {
        return Err(Code::INVALID_ARGUMENT);
    }
    if link < gpu.board.nvlinks { Ok(gpu) } else { Err(Code::NOT_SUPPORTED) }
}

/// The other GPUs in the mesh of a GPU: equal boards with links, none of them in MIG mode.
fn meshed<'a>(session: &'a Session, gpu: &Gpu) -> Result<Vec<&'a Gpu>, Code> {
    let in_mig_mode =
        |g: &Gpu| -> Result<bool, Code> { Ok(g.board.has_mig() && session.node.mig_mode(g.index)?.current) };
    let mut peers = Vec::new();
    if gpu.board.nvlinks == 0 || in_mig_mode(gpu)? {
        return Ok(peers);
    }
    for peer in session.node.gpus() {
        if peer.index != gpu.index && peer.board.key == gpu.board.key && !in_mig_mode(peer)? {
            peers.push(peer);
        }
    }
    Ok(peers)
}

fn put_processors(gpu: &Gpu, words: c_uint, set: Out<c_ulong>) -> Done {
    let node = usize::try_from(gpu.numa_node).map_err(|_| Code::NOT_SUPPORTED)?;
    put_bits(words, set, node * PROCESSORS_PER_NODE..(node + 1) * PROCESSORS_PER_NODE)
}

fn put_bits(words: c_uint, set: Out<c_ulong>, bits: std::ops::Range<usize>) -> Done {
    let words = words as usize;
    if words == 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    if bits.end > words * WORD_BITS {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    set.put_all((0..words).map(|word| {
        let inside = |bit: &usize| bits.contains(&(word * WORD_BITS + bit));
        (0..WORD_BITS).filter(inside).fold(0, |all, bit| all | (1 << bit))
    }))
}
