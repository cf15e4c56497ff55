//! Running graphs.

use super::graph::{KernelParams, KernelParams2};
use crate::capture;
use crate::codes::{Code, Cu};
use crate::driver::Driver;
use crate::entry::api;
use crate::exec;
use crate::ffi::{In, Out};
use crate::resolver::Flavour;
use crate::state::graph::{NodeKind, Set};
use crate::state::work::{HostCall, Work};
use crate::stream;
use crate::types::Copy3d;

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct InstantiateParams {
    flags: u64,
    upload_stream: u64,
    error_node: u64,
    result: i32,
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct UpdateInfo {
    result: i32,
    error_node: u64,
    error_from_node: u64,
}

fn instantiate(driver: &Driver, result: Out<u64>, graph: u64, flags: u64) -> Cu<u64> {
    result.check()?;
    let mut state = driver.lock();
    let made = exec::instantiate(driver, &mut state, graph, flags)?;
    result.put(made)?;
    Ok(made)
}

fn launch(driver: &Driver, handle: u64, stream_handle: u64, flavour: Flavour) -> Cu {
    let target = stream::resolve(&mut driver.lock(), stream_handle, flavour)?;
    if driver.lock().engine.outstanding(target.stream) >= driver.config.launch_queue {
        stream::wait_for_room(driver, target)?;
    }
    let mut state = driver.lock();
    if let Some(id) = capture::of(&state, target.stream)? {
        let child = exec::as_child(&state, handle)?;
        return capture::add(&mut state, id, target.stream, child).map(|_| ());
    }
    capture::check_implicit(&mut state, target)?;
    exec::run(driver, &mut state, handle, target).map(|_| ())
}

fn upload(driver: &Driver, handle: u64, stream_handle: u64, flavour: Flavour) -> Cu {
    let mut state = driver.lock();
    let target = stream::resolve(&mut state, stream_handle, flavour)?;
    exec::back(driver, &mut state, handle)?;
    stream::submit(driver, &mut state, target, &[], Work::Marker);
    Ok(())
}

fn with_params(
    driver: &Driver,
    result: Out<u64>,
    graph: u64,
    place: Out<InstantiateParams>,
    flavour: Flavour,
) -> Cu {
    let params = place.get()?;
    match instantiate(driver, result, graph, params.flags) {
        Ok(made) => {
            place.put(InstantiateParams { result: 0, ..params })?;
            if params.flags & exec::UPLOAD != 0 {
                upload(driver, made, params.upload_stream, flavour)
            } else {
                Ok(())
            }
        }
        Err(code) => {
            place.put(InstantiateParams { result: 1, ..params })?;
            Err(code)
        }
    }
}

fn update(driver: &Driver, handle: u64, graph: u64) -> (Cu, i32) {
    match exec::update(&mut driver.lock(), handle, graph) {
        Ok(()) => (Ok(()), 0),
        // The topology differs; finer reasons are not told apart.
        Err(code) => (Err(code), 2),
    }
}

api! { (driver, flavour)
    Init fn cuGraphInstantiate(result: Out<u64>, graph: u64, error_node: Out<u64>, log: u64, bytes: u64) {
        error_node.offer(0);
        instantiate(driver, result, graph, 0).map(|_| ())
    }

    Init fn cuGraphInstantiate_v2(result: Out<u64>, graph: u64, error_node: Out<u64>, log: u64, bytes: u64) {
        error_node.offer(0);
        instantiate(driver, result, graph, 0).map(|_| ())
    }

    Init fn cuGraphInstantiateWithFlags(result: Out<u64>, graph: u64, flags: u64) {
        instantiate(driver, result, graph, flags).map(|_| ())
    }

    Init fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz(
        result: Out<u64>, graph: u64, params: Out<InstantiateParams>,
    ) {
        with_params(driver, result, graph, params, flavour)
    }

    Init fn cuGraphExecGetFlags(handle: u64, flags: Out<u64>) {
        let found = driver.lock().execs.get(handle)?.flags;
        flags.put(found)
    }

    Init fn cuGraphLaunch | cuGraphLaunch_ptsz(handle: u64, stream: u64) {
        launch(driver, handle, stream, flavour)
    }

    Init fn cuGraphUpload | cuGraphUpload_ptsz(handle: u64, stream: u64) {
        upload(driver, handle, stream, flavour)
    }

    Init fn cuGraphExecDestroy(handle: u64) {
        exec::destroy(driver, &mut driver.lock(), handle)
    }

    Init fn cuGraphExecUpdate(handle: u64, graph: u64, error_node: Out<u64>, result: Out<i32>) {
        let (outcome, reason) = update(driver, handle, graph);
        error_node.offer(0);
        result.offer(reason);
        outcome
    }

    Init fn cuGraphExecUpdate_v2(handle: u64, graph: u64, info: Out<UpdateInfo>) {
        let (outcome, result) = update(driver, handle, graph);
        info.offer(UpdateInfo { result, error_node: 0, error_from_node: 0 });
        outcome
    }

    Init fn cuGraphExecKernelNodeSetParams(handle: u64, node: u64, params: In<KernelParams>) {
        let mut state = driver.lock();
        let launch = params.get()?.launch(&state)?;
        exec::set_node(&mut state, handle, node, NodeKind::Kernel(launch))
    }

    Init fn cuGraphExecKernelNodeSetParams_v2(handle: u64, node: u64, params: In<KernelParams2>) {
        let mut state = driver.lock();
        let launch = params.get()?.launch(&state)?;
        exec::set_node(&mut state, handle, node, NodeKind::Kernel(launch))
    }

    Init fn cuGraphExecMemcpyNodeSetParams(handle: u64, node: u64, copy: In<Copy3d>, context: u64) {
        exec::set_node(&mut driver.lock(), handle, node, NodeKind::Copy(copy.get()?))
    }

    Init fn cuGraphExecMemsetNodeSetParams(handle: u64, node: u64, set: In<Set>, context: u64) {
        exec::set_node(&mut driver.lock(), handle, node, NodeKind::Set(set.get()?))
    }

    Init fn cuGraphExecHostNodeSetParams(handle: u64, node: u64, params: In<[u64; 2]>) {
        let [function, data] = params.get()?;
        let call = HostCall { function: usize::try_from(function).unwrap_or(0), data, stream: None };
        exec::set_node(&mut driver.lock(), handle, node, NodeKind::Host(call))
    }

    Init fn cuGraphNodeSetEnabled(handle: u64, node: u64, enabled: u32) {
        exec::set_enabled(&mut driver.lock(), handle, node, enabled != 0)
    }

    Init fn cuGraphNodeGetEnabled(handle: u64, node: u64, enabled: Out<u32>) {
        let on = exec::is_enabled(&mut driver.lock(), handle, node)?;
        enabled.put(u32::from(on))
    }

    Init fn cuDeviceGraphMemTrim(device: i32) {
        driver.device(device)?;
        let mut state = driver.lock();
        crate::engine::advance(driver, &mut state);
        exec::trim(driver, &mut state, usize::try_from(device).unwrap_or(0));
        Ok(())
    }

    Init fn cuDeviceGetGraphMemAttribute(device: i32, attribute: i32, value: Out<u64>) {
        driver.device(device)?;
        let memory = driver.lock().execs.memory_of(usize::try_from(device).unwrap_or(0));
        value.put(match attribute {
            0 => memory.used,
            1 => memory.used_high,
            2 => memory.reserved,
            3 => memory.reserved_high,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    Init fn cuDeviceSetGraphMemAttribute(device: i32, attribute: i32, value: In<u64>) {
        driver.device(device)?;
        let mut state = driver.lock();
        let memory = state.execs.memory_mut(usize::try_from(device).unwrap_or(0));
        // The high-water marks can only be reset.
        match (attribute, value.get()?) {
            (1, 0) => memory.used_high = memory.used,
            (3, 0) => memory.reserved_high = memory.reserved,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }
}
