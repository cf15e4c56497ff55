//! How GPUs are connected to each other and to processors.

use std::ffi::{c_int, c_uint, c_ulong};

use aliquot_sim_node::{Architecture, Gpu, NvLinks};
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
        let wired = peers(session, first).iter().any(|peer| peer.index == second.index);
        status.put(if wired && is_up(session, first, End::Gpu(second))? {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK
        } else {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED
        })
    }

    fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, active: Out<c_uint>) |session| {
        let (gpu, end) = link_of(session, device, link)?;
        active.put(is_up(session, gpu, end)?.into())
    }

    fn nvmlDeviceGetNvLinkVersion(device: Handle, link: c_uint, version: Out<c_uint>) |session| {
        version.put(match link_of(session, device, link)?.0.board.architecture {
            Architecture::Turing => 2,
            Architecture::Ampere | Architecture::Ada => 3,
            Architecture::Hopper => 4,
            Architecture::Blackwell => 5,
        })
    }

    fn nvmlDeviceGetNvLinkCapability(
        device: Handle, link: c_uint, _capability: c_uint, result: Out<c_uint>,
    ) |session| {
        let (gpu, end) = link_of(session, device, link)?;
        result.put(is_up(session, gpu, end)?.into())
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, pci: Out<sys::nvmlPciInfo_t>) |session| {
        match link_of(session, device, link)? {
            (gpu, end @ End::Gpu(peer)) if is_up(session, gpu, end)? => pci.put(pci_info(peer)),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: c_uint, kind: Out<c_uint>) |session| {
        kind.put(match link_of(session, device, link)?.1 {
            End::Switch => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
            End::Gpu(_) => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            End::Nowhere => sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN,
        })
    }

    fn nvmlDeviceGetGpuFabricInfo(device: Handle, info: Out<sys::nvmlGpuFabricInfo_t>) |session| {
        let gpu = session.gpu(device)?;
        // Boards before Hopper need no registration with the fabric.
        let registers = matches!(gpu.board.architecture, Architecture::Hopper | Architecture::Blackwell);
        let state = match session.node.spec().nvlinks == NvLinks::Switches && registers && gpu.board.nvlinks > 0 {
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

/// Where a link ends.
#[derive(Clone, Copy)]
enum End<'a> {
    Gpu(&'a Gpu),
    Switch,
    Nowhere,
}

/// The GPU of a handle and where a link of it ends, if it has this link. Links are dealt out to the peers in turn.
fn link_of(session: &Session, device: Handle, link: c_uint) -> Result<(&Gpu, End<'_>), Code> {
    let gpu = session.gpu(device)?;
    if link >= sys::NVML_NVLINK_MAX_LINKS {
        return Err(Code::INVALID_ARGUMENT);
    }
    if link >= gpu.board.nvlinks {
        return Err(Code::NOT_SUPPORTED);
    }
    if session.node.spec().nvlinks == NvLinks::Switches {
        return Ok((gpu, End::Switch));
    }
    let peers = peers(session, gpu);
    let turn = (link as usize).checked_rem(peers.len());
    let peer = turn.and_then(|turn| peers.get(turn).copied());
    Ok((gpu, peer.map_or(End::Nowhere, End::Gpu)))
}

/// The GPUs that a GPU is wired to.
fn peers<'a>(session: &'a Session, gpu: &Gpu) -> Vec<&'a Gpu> {
    let pairs = session.node.spec().nvlinks == NvLinks::Pairs;
    let is_peer = |other: &&Gpu| {
        let bridged = !pairs || other.index / 2 == gpu.index / 2;
        gpu.board.nvlinks > 0 && other.index != gpu.index && other.board.key == gpu.board.key && bridged
    };
    session.node.gpus().iter().filter(is_peer).collect()
}

/// Whether a link carries anything: a GPU in MIG mode has its links off.
fn is_up(session: &Session, gpu: &Gpu, end: End<'_>) -> Result<bool, Code> {
    let off = |gpu: &Gpu| -> Result<bool, Code> {
        Ok(gpu.board.has_mig() && session.node.mig_mode(gpu.index)?.current)
    };
    Ok(!off(gpu)?
        && match end {
            End::Gpu(peer) => !off(peer)?,
            End::Switch => true,
            End::Nowhere => false,
        })
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
