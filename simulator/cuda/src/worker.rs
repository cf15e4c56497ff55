//! The driver's two threads: one lets the device's work happen on time, one calls the program's functions.
//!
//! Both start with the first work that needs them and end with the process.

use std::time::Duration;

use aliquot_sim_node::now_ns;

use crate::driver::{self, Driver};
use crate::state::State;
use crate::state::work::HostCall;
use crate::{engine, exec};

/// Starts the threads, unless they have been started.
pub(crate) fn start(driver: &'static Driver) {
    driver.started.call_once(|| {
        for (name, body) in [("cuda-sim", run as fn()), ("cuda-sim-host", call as fn())] {
            // A process that may not have threads goes without: its work still happens when it asks for it.
            let _ = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                block_signals();
                body();
            });
        }
    });
}

/// The program's signals are for its own threads.
fn block_signals() {
    // SAFETY: zeroes are a valid set to fill.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid for both calls, which only change this thread's mask.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}

fn run() {
    let driver = driver::get();
    let mut state = driver.lock();
    while !driver.is_exiting() {
        engine::advance(driver, &mut state);
        call_ended(driver, &mut state);
        let wait = engine::next_look(driver, &state, None).saturating_sub(now_ns());
        state = driver.wait_work(state, Duration::from_nanos(wait.max(1_000)));
    }
}

/// Destructors of user objects whose last holder was a graph.
fn call_ended(driver: &Driver, state: &mut State) {
    exec::collect(driver, state);
    for (function, data) in std::mem::take(&mut state.user_objects.ended) {
        invoke(HostCall { function, data, stream: None });
    }
}

fn call() {
    let driver = driver::get();
    let mut state = driver.lock();
    while !driver.is_exiting() {
        match state.engine.next_call() {
            Some((id, call)) => {
                drop(state);
                invoke(call);
                state = driver.lock();
                engine::call_returned(driver, &mut state, id);
                driver.wake_worker(&state);
            }
            None => state = driver.wait_changed(state, Duration::from_millis(500)),
        }
    }
}

fn invoke(call: HostCall) {
    type Plain = extern "C" fn(u64);
    type OfStream = extern "C" fn(u64, i32, u64);
    if call.function == 0 {
        return;
    }
    if let Some(stream) = call.stream {
        // SAFETY: the program passed this function as one that takes a stream, a status and its own word.
        let function = unsafe { std::mem::transmute::<usize, OfStream>(call.function) };
        function(stream, 0, call.data);
    } else {
        // SAFETY: the program passed this function as one that takes its own word.
        let function = unsafe { std::mem::transmute::<usize, Plain>(call.function) };
        function(call.data);
    }
}
