//! Who uses a device, and how much.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use aliquot_sim_node::{ProcessUse, ProcessView};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out, put_list, version_of};
use crate::call::{Code, Session, export};

/// `NVML_VALUE_NOT_AVAILABLE` in a field without sign.
const NOT_AVAILABLE: u64 = u64::MAX;
/// What the id fields say of a process that is not on a MIG device.
const NO_INSTANCE: c_uint = c_uint::MAX;
/// Host pids that nobody of the host has looked up yet appear from here on; beyond every real pid.
const UNKNOWN_PIDS: usize = 1 << 22;

export! {
    fn nvmlDeviceGetComputeRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) |session| {
        let rows: Vec<_> = running(session, device)?
            .iter()
            .map(|p| sys::nvmlProcessInfo_v1_t { pid: p.pid, usedGpuMemory: p.bytes })
            .collect();
        put_list(count, infos, &rows)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v2_t>,
    ) |session| {
        put_list(count, infos, &running_rows(session, device)?)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |session| {
        put_list(count, infos, &running_rows(session, device)?)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) |session| {
        session.mig_device(device)?;
        put_list(count, infos, &[])
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v2_t>,
    ) |session| {
        session.mig_device(device)?;
        put_list(count, infos, &[])
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |session| {
        session.mig_device(device)?;
        put_list(count, infos, &[])
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) |session| {
        let rows: Vec<_> = mps_clients(session, device)?
            .iter()
            .map(|p| sys::nvmlProcessInfo_v1_t { pid: p.pid, usedGpuMemory: p.bytes })
            .collect();
        put_list(count, infos, &rows)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v2_t>,
    ) |session| {
        put_list(count, infos, &rows(&mps_clients(session, device)?))
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_t>,
    ) |session| {
        put_list(count, infos, &rows(&mps_clients(session, device)?))
    }

    fn nvmlDeviceGetRunningProcessDetailList(device: Handle, list: Out<sys::nvmlProcessDetailList_t>) |session| {
        let mut header = list.get()?;
        if header.version != version_of::<sys::nvmlProcessDetailList_t>(1) {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        // Modes: 0 compute, 1 graphics, 2 MPS.
        let rows: Vec<_> = match header.mode {
            0 => running(session, device)?,
            1 => Vec::new(),
            2 => mps_clients(session, device)?,
            _ => return Err(Code::INVALID_ARGUMENT),
        }
        .iter()
        .map(|p| sys::nvmlProcessDetail_v1_t {
            pid: p.pid,
            usedGpuMemory: p.bytes,
            gpuInstanceId: p.gi,
            computeInstanceId: p.ci,
            usedGpuCcProtectedMemory: 0,
        })
        .collect();
        let room = header.numProcArrayEntries;
        header.numProcArrayEntries = rows.len() as c_uint;
        list.put(header)?;
        if rows.is_empty() {
            return Ok(());
        }
        if (room as usize) < rows.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        Out::from_field(header.procArray).put_all(rows)
    }

    fn nvmlDeviceGetUtilizationRates(device: Handle, rates: Out<sys::nvmlUtilization_t>) |session| {
        let gpu = utilization_gpu(session, device)?;
        let percent = session.node.utilization(gpu)?.gpu;
        // Memory traffic is not simulated: kernels are taken to use a third of the bandwidth.
        rates.put(sys::nvmlUtilization_t { gpu: percent, memory: percent / 3 })
    }

    fn nvmlDeviceGetProcessUtilization(
        device: Handle,
        samples: Out<sys::nvmlProcessUtilizationSample_t>,
        count: Out<c_uint>,
        last_seen: c_ulonglong,
    ) |session| {
        let gpu = utilization_gpu(session, device)?;
        let now = micros_of_day();
        let rows: Vec<_> = process_utilization(session, gpu)?
            .into_iter()
            .map(|(pid, percent)| sys::nvmlProcessUtilizationSample_t {
                pid,
                timeStamp: now,
                smUtil: percent,
                memUtil: percent / 3,
                encUtil: 0,
                decUtil: 0,
            })
            .collect();
        if rows.is_empty() || last_seen >= now {
            count.put(0)?;
            return Err(Code::NOT_FOUND);
        }
        if samples.is_null() {
            count.put(rows.len() as c_uint)?;
            return Err(Code::INSUFFICIENT_SIZE);
        }
        put_list(count, samples, &rows)
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(
        device: Handle, list: Out<sys::nvmlProcessesUtilizationInfo_t>,
    ) |session| {
        let mut header = list.get()?;
        if header.version != version_of::<sys::nvmlProcessesUtilizationInfo_t>(1) {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let gpu = utilization_gpu(session, device)?;
        let now = micros_of_day();
        let rows: Vec<_> = process_utilization(session, gpu)?
            .into_iter()
            .map(|(pid, percent)| sys::nvmlProcessUtilizationInfo_v1_t {
                timeStamp: now,
                pid,
                smUtil: percent,
                memUtil: percent / 3,
                encUtil: 0,
                decUtil: 0,
                jpgUtil: 0,
                ofaUtil: 0,
            })
            .collect();
        let room = header.processSamplesCount;
        let seen_before = header.lastSeenTimeStamp >= now;
        header.processSamplesCount = if seen_before { 0 } else { rows.len() as c_uint };
        list.put(header)?;
        if rows.is_empty() || seen_before {
            return Err(Code::NOT_FOUND);
        }
        if (room as usize) < rows.len() || header.procUtilArray.is_null() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        Out::from_field(header.procUtilArray).put_all(rows)
    }

    fn nvmlDeviceGetAccountingMode(device: Handle, mode: Out<c_uint>) |session| {
        session.gpu(device)?;
        mode.put(0)
    }

    fn nvmlDeviceGetAccountingPids(device: Handle, count: Out<c_uint>, pids: Out<c_uint>) |session| {
        session.gpu(device)?;
        put_list(count, pids, &[])
    }

    fn nvmlDeviceGetAccountingBufferSize(device: Handle, size: Out<c_uint>) |session| {
        session.gpu(device)?;
        size.put(4000)
    }
}

/// A process as NVML tells of it.
struct Row {
    pid: c_uint,
    bytes: u64,
    gi: c_uint,
    ci: c_uint,
    mps: bool,
}

fn running(session: &Session, device: Handle) -> Result<Vec<Row>, Code> {
    let only = session.mig_device(device)?;
    let gpu = if only.is_some() { session.parent(device)? } else { session.whole(device)? };
    let view = session.node.process_view()?;
    let mut rows = Vec::new();
    for process in session.node.processes(gpu.index)? {
        let elsewhere = only.as_ref().is_some_and(|mig| {
            process.pool.gi != Some(mig.gi.id) || process.ci.is_some_and(|ci| ci != mig.ci.id)
        });
        let Some(pid) = pid_in_view(&process, view).filter(|_| !elsewhere) else { continue };
        rows.push(Row {
            pid,
            bytes: if view == ProcessView::NotAvailable { NOT_AVAILABLE } else { process.bytes },
            gi: process.pool.gi.unwrap_or(NO_INSTANCE),
            ci: process.ci.unwrap_or(NO_INSTANCE),
            mps: process.mps_daemon.is_some(),
        });
    }
    Ok(rows)
}

/// Those of them that are clients of an MPS control daemon.
fn mps_clients(session: &Session, device: Handle) -> Result<Vec<Row>, Code> {
    Ok(running(session, device)?.into_iter().filter(|row| row.mps).collect())
}

fn running_rows(session: &Session, device: Handle) -> Result<Vec<sys::nvmlProcessInfo_v2_t>, Code> {
    Ok(rows(&running(session, device)?))
}

fn rows(rows: &[Row]) -> Vec<sys::nvmlProcessInfo_v2_t> {
    let row = |p: &Row| sys::nvmlProcessInfo_v2_t {
        pid: p.pid,
        usedGpuMemory: p.bytes,
        gpuInstanceId: p.gi,
        computeInstanceId: p.ci,
    };
    rows.iter().map(row).collect()
}

/// The pid under which a process is listed, or that it is not.
fn pid_in_view(process: &ProcessUse, view: ProcessView) -> Option<c_uint> {
    let pid = match view {
        ProcessView::Empty => None,
        ProcessView::Own => process.visible_pid,
        ProcessView::Host | ProcessView::NotAvailable => {
            process.host_pid.or_else(|| i32::try_from(UNKNOWN_PIDS + process.slot).ok())
        }
    };
    pid.and_then(|p| c_uint::try_from(p).ok())
}

/// The GPU whose utilisation is asked for; there is none of MIG devices, nor of a GPU in MIG mode.
fn utilization_gpu(session: &Session, device: Handle) -> Result<usize, Code> {
    let gpu = match session.mig_device(device)? {
        Some(_) => return Err(Code::NOT_SUPPORTED),
        None => session.gpu(device)?,
    };
    let in_mig_mode = gpu.board.has_mig() && session.node.mig_mode(gpu.index)?.current;
    if in_mig_mode { Err(Code::NOT_SUPPORTED) } else { Ok(gpu.index) }
}

fn process_utilization(session: &Session, gpu: usize) -> Result<Vec<(c_uint, c_uint)>, Code> {
    let view = session.node.process_view()?;
    let processes = session.node.processes(gpu)?;
    let mut rows = Vec::new();
    for (slot, percent) in session.node.utilization(gpu)?.processes {
        let process = processes.iter().find(|p| p.slot == slot);
        if let Some(pid) = process.and_then(|p| pid_in_view(p, view)) {
            rows.push((pid, percent));
        }
    }
    Ok(rows)
}

fn micros_of_day() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}
