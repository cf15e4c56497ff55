//! Event sets: XID and ECC errors.

use std::ffi::{c_uint, c_ulonglong};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aliquot_sim_node::Event;
use aliquot_sim_node::events::ACCEPTED;
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{Handle, Out, Thing};
use crate::call::{Code, Done, EventSet, Registered, Session, export};

static NEXT_SET: AtomicU64 = AtomicU64::new(1);

export! {
    fn nvmlDeviceGetSupportedEventTypes(device: Handle, types: Out<c_ulonglong>) |session| {
        session.parent(device)?;
        types.put(ACCEPTED)
    }

    fn nvmlEventSetCreate(set: Out<Handle>) |session| {
        set.check()?;
        let id = NEXT_SET.fetch_add(1, Ordering::Relaxed);
        let after = session.node.last_event()?;
        sets(session).insert(id, EventSet { after, registered: Vec::new() });
        set.put(Thing::EventSet { id }.into())
    }

    fn nvmlDeviceRegisterEvents(device: Handle, types: c_ulonglong, set: Handle) |session| {
        let gpu = session.parent(device)?.index;
        if types & !ACCEPTED != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let id = set_id(set)?;
        sets(session).get_mut(&id).ok_or(Code::INVALID_ARGUMENT)?.registered.push(Registered {
            gpu,
            types,
            _hold: session.node.hold_mode(gpu),
        });
        Ok(())
    }

    fn nvmlEventSetWait(set: Handle, data: Out<sys::nvmlEventData_t>, timeout_ms: c_uint) |session| {
        wait(session, set, data, timeout_ms)
    }

    fn nvmlEventSetWait_v2(set: Handle, data: Out<sys::nvmlEventData_t>, timeout_ms: c_uint) |session| {
        wait(session, set, data, timeout_ms)
    }

    fn nvmlEventSetFree(set: Handle) |session| {
        let id = set_id(set)?;
        sets(session).remove(&id).map(|_| ()).ok_or(Code::INVALID_ARGUMENT)
    }
}

fn sets(session: &Session) -> std::sync::MutexGuard<'_, std::collections::HashMap<u64, EventSet>> {
    session.event_sets.lock().unwrap_or_else(PoisonError::into_inner)
}

fn set_id(set: Handle) -> Result<u64, Code> {
    match set.thing() {
        Some(Thing::EventSet { id }) => Ok(id),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

fn wait(session: &Session, set: Handle, data: Out<sys::nvmlEventData_t>, timeout_ms: c_uint) -> Done {
    data.check()?;
    let id = set_id(set)?;
    let (after, registered) = {
        let sets = sets(session);
        let set = sets.get(&id).ok_or(Code::INVALID_ARGUMENT)?;
        (set.after, set.registered.iter().map(|one| (one.gpu, one.types)).collect::<Vec<_>>())
    };
    let wanted =
        |event: &Event| registered.iter().any(|(gpu, types)| *gpu == event.gpu && types & event.kind != 0);
    let timeout = Duration::from_millis(timeout_ms.into());
    let event = session.node.wait_event(after, timeout, wanted)?.ok_or(Code::TIMEOUT)?;
    if let Some(set) = sets(session).get_mut(&id) {
        set.after = set.after.max(event.number);
    }
    data.put(sys::nvmlEventData_t {
        device: Handle::from(Thing::Gpu { index: event.gpu }).as_pointer(),
        eventType: event.kind,
        eventData: event.data,
        gpuInstanceId: event.gi.unwrap_or(c_uint::MAX),
        computeInstanceId: event.ci.unwrap_or(c_uint::MAX),
    })
}
