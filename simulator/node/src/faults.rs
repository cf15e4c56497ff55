//! Faults on request: fail or delay chosen calls of a library function.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::NodeError;
use crate::layout::{FaultSlot, State};
use crate::node::{Node, text_of, write_text};

/// A fault to inject into calls of one exported function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Exported name, such as `nvmlDeviceCreateGpuInstanceWithPlacement`.
    pub function: String,
    /// First call that is hit, counted from 1 over all processes since the rule was made.
    pub nth: u64,
    /// How many calls are hit; `u64::MAX` is all from there on.
    pub times: u64,
    /// Wait before the call does anything.
    pub delay: Duration,
    /// The only GPU whose calls are hit, by index; `None` for calls on any GPU or none. NVML calls only.
    pub gpu: Option<usize>,
    /// What the call returns instead of doing anything (`nvmlReturn_t` or `CUresult`).
    pub code: Option<i32>,
}

impl Fault {
    /// Fails the `nth` call of a function once.
    pub fn fail(function: impl Into<String>, nth: u64, code: i32) -> Self {
        Self { function: function.into(), nth, times: 1, delay: Duration::ZERO, gpu: None, code: Some(code) }
    }

    /// Delays every call of a function.
    pub fn delay(function: impl Into<String>, delay: Duration) -> Self {
        Self { function: function.into(), nth: 1, times: u64::MAX, delay, gpu: None, code: None }
    }

    /// The same for calls on one GPU only.
    #[must_use]
    pub fn on(self, gpu: usize) -> Self {
        Self { gpu: Some(gpu), ..self }
    }
}

/// A rule in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultRule {
    /// Its id.
    pub id: u64,
    /// What it does.
    pub fault: Fault,
    /// Calls of the function since the rule was made.
    pub calls: u64,
}

fn active(state: *mut State) -> *mut u32 {
    state.cast::<u8>().wrapping_add(std::mem::offset_of!(State, faults_active)).cast()
}

impl Node {
    /// Puts a fault in force. Rules outlive processes and reboots, until removed.
    pub fn add_fault(&self, fault: &Fault) -> Result<u64, NodeError> {
        let longest = size_of_val(&FaultSlot::NONE.function) - 1;
        if fault.nth == 0 || fault.function.is_empty() || fault.function.len() > longest {
            return Err(NodeError::InvalidArgument(
                "a fault needs a function's name and counts calls from 1",
            ));
        }
        let mut state = self.lock()?;
        let id = state.last_fault + 1;
        let slot = state.faults.iter_mut().find(|f| f.id == 0).ok_or(NodeError::Full("fault"))?;
        *slot = FaultSlot {
            id,
            nth: fault.nth,
            times: fault.times,
            delay_us: u64::try_from(fault.delay.as_micros()).unwrap_or(u64::MAX),
            code: fault.code.unwrap_or(0),
            fails: u32::from(fault.code.is_some()),
            gpu: slot_of(fault.gpu),
            ..FaultSlot::NONE
        };
        write_text(&mut slot.function, &fault.function);
        state.last_fault = id;
        self.map.shared_word(active).fetch_add(1, Ordering::Relaxed);
        Ok(id)
    }

    /// The rules in force.
    pub fn faults(&self) -> Result<Vec<FaultRule>, NodeError> {
        let state = self.lock()?;
        let rules = state.faults.iter().filter(|f| f.id != 0).map(|f| FaultRule {
            id: f.id,
            calls: f.calls,
            fault: Fault {
                function: text_of(&f.function),
                nth: f.nth,
                times: f.times,
                delay: Duration::from_micros(f.delay_us),
                gpu: f.gpu.checked_sub(1).and_then(|gpu| usize::try_from(gpu).ok()),
                code: (f.fails == 1).then_some(f.code),
            },
        });
        Ok(rules.collect())
    }

    /// Removes one rule, or all.
    pub fn remove_faults(&self, id: Option<u64>) -> Result<(), NodeError> {
        let mut state = self.lock()?;
        let mut removed = 0;
        for slot in state.faults.iter_mut().filter(|f| f.id != 0 && id.is_none_or(|id| id == f.id)) {
            *slot = FaultSlot::NONE;
            removed += 1;
        }
        self.map.shared_word(active).fetch_sub(removed, Ordering::Relaxed);
        if removed == 0 && id.is_some() {
            return Err(NodeError::NotFound("no such fault rule"));
        }
        Ok(())
    }

    /// To be called first in every exported function: waits out delays, and returns the code to fail with.
    ///
    /// Costs one load while no rule is in force.
    pub fn enter(&self, function: &str) -> Option<i32> {
        self.enter_on(function, None)
    }

    /// To be called in every exported function as soon as it knows the GPU that it is about, after
    /// [`Self::enter`]: the same for the rules of that GPU.
    pub fn enter_on(&self, function: &str, gpu: Option<usize>) -> Option<i32> {
        if self.map.shared_word(active).load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (mut delay, mut code) = (0_u64, None);
        {
            let mut state = self.lock().ok()?;
            let meant =
                |f: &&mut FaultSlot| f.id != 0 && f.gpu == slot_of(gpu) && text_of(&f.function) == function;
            for rule in state.faults.iter_mut().filter(meant) {
                rule.calls += 1;
                let since = rule.calls.checked_sub(rule.nth);
                if since.is_some_and(|n| n < rule.times) {
                    delay = delay.saturating_add(rule.delay_us);
                    if rule.fails == 1 {
                        code = code.or(Some(rule.code));
                    }
                }
            }
        }
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        code
    }
}

impl FaultSlot {
    const NONE: Self =
        Self { id: 0, function: [0; 80], calls: 0, nth: 0, times: 0, delay_us: 0, code: 0, fails: 0, gpu: 0 };
}

/// A GPU as a rule holds it.
fn slot_of(gpu: Option<usize>) -> u64 {
    gpu.and_then(|gpu| u64::try_from(gpu).ok()?.checked_add(1)).unwrap_or(0)
}
