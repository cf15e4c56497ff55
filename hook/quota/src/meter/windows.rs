//! Windows: short launches that are timed together, by one pair of events on each of their streams.
//!
//! One window is open at a time. It is spoilt by whatever would make it count something else: launches of
//! other threads on a thread's own stream, waits at the gate, captures, streams that go.

use super::types::{Lane, Window};
use super::{
    LATER_NS, Launch, MIXED, Meter, Pending, Plan, SOON_NS, SPARSE, STREAMS, WINDOW, WINDOW_NS, WINDOWS,
};

impl Meter {
    /// Returns true if a window is open, so that every launch has to be shown.
    pub fn is_watching(&self) -> bool {
        self.windows.iter().flatten().any(|window| !window.is_closed)
    }

    /// Opens a window with a launch.
    pub(super) fn open(&mut self, launch: &Launch, account: u32, charged_ns: u64, now_ns: u64) -> Plan {
        let Some(at) = self.windows.iter().position(Option::is_none) else { return Plan::default() };
        self.due_ns = (self.due_ns * 2).clamp(SOON_NS, LATER_NS);
        let Some(lane) = self.new_lane(launch.stream) else { return Plan::default() };
        let mut window = Window {
            context: launch.context,
            account,
            thread: launch.thread,
            first_ns: now_ns,
            last_ns: now_ns,
            launches: 1,
            charged_ns,
            keys: [(0, 0); MIXED],
            lanes: [Lane::default(); STREAMS],
            lane_count: 1,
            has_thread_stream: launch.is_thread_stream,
            is_closed: false,
            is_ready: false,
            is_spoilt: false,
        };
        let ([of, ..], [key, ..]) = (&mut window.lanes, &mut window.keys);
        (*of, *key) = (lane, (launch.key, 1));
        if let Some(free) = self.windows.get_mut(at) {
            *free = Some(window);
        }
        Plan { before: Some(lane.start), window: Some(at), ..Plan::default() }
    }

    fn new_lane(&mut self, stream: u64) -> Option<Lane> {
        let start = self.take_event()?;
        let Some(end) = self.take_event() else {
            self.free_event(start);
            return None;
        };
        Some(Lane { stream, start, end })
    }

    /// Adds a launch to the open window, if it belongs there.
    pub(super) fn join(
        &mut self,
        launch: &Launch,
        account: u32,
        charged_ns: u64,
        now_ns: u64,
        is_short: bool,
    ) -> Plan {
        let open = |window: &Option<Window>| {
            window.is_some_and(|window| !window.is_closed && window.context == launch.context)
        };
        let Some(at) = self.windows.iter().position(open) else { return Plan::default() };
        let window = self.windows.get(at).copied().flatten();
        let Some(mut window) = window else { return Plan::default() };
        let is_strange =
            (launch.is_thread_stream || window.has_thread_stream) && launch.thread != window.thread;
        if is_strange || account != window.account {
            self.spoil(at);
            return Plan::default();
        }
        let mut plan = Plan { window: Some(at), ..Plan::default() };
        let lanes = window.lanes.get(..window.lane_count).unwrap_or_default();
        if !lanes.iter().any(|lane| lane.stream == launch.stream) {
            let free = window.lane_count < STREAMS;
            let Some(lane) = free.then(|| self.new_lane(launch.stream)).flatten() else {
                self.spoil(at);
                return Plan::default();
            };
            if let Some(place) = window.lanes.get_mut(window.lane_count) {
                *place = lane;
                window.lane_count += 1;
            }
            plan.before = Some(lane.start);
        }
        window.has_thread_stream |= launch.is_thread_stream;
        if is_short {
            window.launches += 1;
            window.last_ns = now_ns;
            window.charged_ns = window.charged_ns.saturating_add(charged_ns);
            let key = window.keys.iter_mut().find(|(key, count)| *key == launch.key || *count == 0);
            if let Some(entry) = key {
                *entry = (launch.key, entry.1 + 1);
            }
            let is_full =
                window.launches >= WINDOW || (window.launches >= 2 && window.charged_ns >= WINDOW_NS);
            if is_full && launch.thread == window.thread && !launch.is_delicate {
                window.is_closed = true;
                plan.closes = Some(at);
            }
        }
        if let Some(place) = self.windows.get_mut(at) {
            *place = Some(window);
        }
        plan
    }

    /// Marks a window as showing nothing; it is dropped at once, or when its owner comes back.
    pub(super) fn spoil(&mut self, at: usize) {
        let Some(Some(window)) = self.windows.get_mut(at) else { return };
        window.is_spoilt = true;
        if window.is_closed && !window.is_ready {
            return;
        }
        self.drop_window(at);
        self.sparse = SPARSE;
    }

    pub(super) fn drop_window(&mut self, at: usize) {
        let Some(window) = self.windows.get_mut(at).and_then(Option::take) else { return };
        for lane in window.lanes.get(..window.lane_count).unwrap_or_default() {
            self.free_event(lane.start);
            self.free_event(lane.end);
        }
    }

    /// Returns the streams of a window, the events to record on them, and their number; none for a spoilt
    /// window.
    pub fn lanes(&self, at: usize) -> ([(u64, usize); STREAMS], usize) {
        let mut out = [(0, 0); STREAMS];
        let window = self.windows.get(at).copied().flatten();
        let Some(window) = window.filter(|window| !window.is_spoilt) else { return (out, 0) };
        for (to, lane) in out.iter_mut().zip(&window.lanes) {
            *to = (lane.stream, lane.end);
        }
        (out, window.lane_count)
    }

    /// Returns the closed window of a context.
    pub fn closed(&self, context: u64) -> Option<Pending> {
        let is_ready = |window: &Option<Window>| window.is_some_and(|w| w.is_ready && w.context == context);
        self.windows.iter().position(is_ready).map(Pending::Window)
    }

    /// Prepares for the end of a stream. Returns false if a window is being closed on the stream at this
    /// moment; the stream must stay until that has happened.
    pub fn stream_gone(&mut self, stream: u64) -> bool {
        let mut is_free = true;
        for at in 0..WINDOWS {
            let Some(window) = self.windows.get(at).copied().flatten() else { continue };
            let lanes = window.lanes.get(..window.lane_count).unwrap_or_default();
            if !window.is_ready && lanes.iter().any(|lane| lane.stream == stream) {
                is_free &= !window.is_closed;
                self.spoil(at);
            }
        }
        is_free
    }

    /// Spoils an open window because a launch has to wait at the gate, which the window would count.
    pub fn waits(&mut self) {
        let before = self.sparse;
        self.spoil_open();
        self.sparse = before;
    }

    /// Spoils an open window, because a capture begins or launches go by unseen. Returns false if a window is
    /// being closed at this moment, and events may still be recorded on its streams.
    pub fn spoil_open(&mut self) -> bool {
        let mut is_free = true;
        for at in 0..WINDOWS {
            if let Some(window) = self.windows.get(at).copied().flatten().filter(|window| !window.is_ready) {
                is_free &= !window.is_closed;
                self.spoil(at);
            }
        }
        is_free
    }
}
