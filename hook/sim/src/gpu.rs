//! One GPU in virtual time: processes have streams, streams have kernels and events, and processes that have
//! work take turns, a time slice each.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// One item of a stream.
#[derive(Clone, Copy, Debug)]
enum Work {
    Kernel {
        left_ns: u64,
        width: u32,
        order: u64,
    },
    Event(usize),
    /// A gap of this many nanoseconds, from when the stream comes to it: the time between two kernels of a
    /// graph.
    Gap(u64),
    /// A gap that the stream has come to, with its end.
    Until(u64),
}

/// The width of a kernel that fills the GPU.
pub const WHOLE: u32 = 1000;

#[derive(Default)]
struct Stream {
    queue: VecDeque<Work>,
    kernels: usize,
    runs: bool,
}

#[derive(Default)]
struct Process {
    streams: Vec<Stream>,
    /// The time at which each event was reached; `None` if it has not been.
    events: Vec<Option<u64>>,
    width: u32,
    running: Vec<usize>,
    used_ns: u64,
}

/// How the GPU switches between processes.
#[derive(Clone, Copy, Debug)]
pub struct Slices {
    /// The time for which a process runs while others wait, in nanoseconds.
    pub slice_ns: u64,
    /// The cost of a switch, in nanoseconds.
    pub switch_ns: u64,
}

/// The simulated GPU.
pub struct Gpu {
    now_ns: u64,
    slices: Slices,
    processes: Vec<Process>,
    current: usize,
    slice_left_ns: u64,
    switch_left_ns: u64,
    launches: u64,
    /// The ends of gaps, and whose they are.
    gaps: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Gpu {
    /// Returns an idle GPU.
    pub fn new(slices: Slices, processes: usize, streams: usize, events: usize) -> Self {
        let process = || Process {
            streams: (0..streams).map(|_| Stream::default()).collect(),
            events: vec![None; events],
            ..Process::default()
        };
        Self {
            now_ns: 1_000_000_000,
            slices,
            processes: (0..processes).map(|_| process()).collect(),
            current: 0,
            slice_left_ns: 0,
            switch_left_ns: 0,
            launches: 0,
            gaps: BinaryHeap::new(),
        }
    }

    /// Returns the time of the clock in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Returns the GPU time of a process in nanoseconds: the time in which it was switched in and had a
    /// kernel on the GPU.
    pub fn used_ns(&self, process: usize) -> u64 {
        self.processes.get(process).map_or(0, |p| p.used_ns)
    }

    /// Returns the number of kernels that a stream was given and has not ended.
    pub fn depth(&self, process: usize, stream: usize) -> usize {
        self.processes.get(process).and_then(|p| p.streams.get(stream)).map_or(0, |s| s.kernels)
    }

    /// Returns the time at which an event was reached.
    pub fn event(&self, process: usize, event: usize) -> Option<u64> {
        self.processes.get(process)?.events.get(event).copied().flatten()
    }

    /// Gives a stream a kernel.
    pub fn launch(&mut self, process: usize, stream: usize, cost_ns: u64, width: u32) {
        self.launches += 1;
        let work =
            Work::Kernel { left_ns: cost_ns.max(1), width: width.clamp(1, WHOLE), order: self.launches };
        if let Some(s) = self.processes.get_mut(process).and_then(|p| p.streams.get_mut(stream)) {
            s.queue.push_back(work);
            s.kernels += 1;
        }
        self.start(process);
    }

    /// Makes a stream do nothing for `gap_ns` after what it was given.
    pub fn idle(&mut self, process: usize, stream: usize, gap_ns: u64) {
        if let Some(s) = self.processes.get_mut(process).and_then(|p| p.streams.get_mut(stream)) {
            s.queue.push_back(Work::Gap(gap_ns));
        }
        self.start(process);
    }

    /// Records an event on a stream.
    pub fn record(&mut self, process: usize, stream: usize, event: usize) {
        if let Some(p) = self.processes.get_mut(process) {
            if let Some(cell) = p.events.get_mut(event) {
                *cell = None;
            }
            if let Some(s) = p.streams.get_mut(stream) {
                s.queue.push_back(Work::Event(event));
            }
        }
        self.start(process);
    }

    /// Reaches events, begins and ends gaps, and starts kernels that are first in their streams and have
    /// room.
    fn start(&mut self, process: usize) {
        let now = self.now_ns;
        let Some(p) = self.processes.get_mut(process) else { return };
        for stream in &mut p.streams {
            while let Some(first) = stream.queue.front_mut() {
                match *first {
                    Work::Event(event) => {
                        if let Some(cell) = p.events.get_mut(event) {
                            *cell = Some(now);
                        }
                    }
                    Work::Gap(gap_ns) => {
                        *first = Work::Until(now + gap_ns);
                        self.gaps.push(Reverse((now + gap_ns, process)));
                        break;
                    }
                    Work::Until(end_ns) if end_ns <= now => {}
                    Work::Until(_) | Work::Kernel { .. } => break,
                }
                stream.queue.pop_front();
            }
        }
        // First come, first served.
        while p.width < WHOLE {
            let waiting = p.streams.iter().enumerate().filter(|(_, stream)| !stream.runs);
            let first = waiting
                .filter_map(|(index, stream)| match stream.queue.front()? {
                    Work::Kernel { width, order, .. } => Some((*order, index, *width)),
                    _ => None,
                })
                .min();
            let Some((_, index, width)) = first.filter(|(_, _, width)| p.width + width <= WHOLE) else {
                break;
            };
            if let Some(stream) = p.streams.get_mut(index) {
                stream.runs = true;
            }
            p.width += width;
            p.running.push(index);
        }
    }

    fn has_work(&self, process: usize) -> bool {
        self.processes.get(process).is_some_and(|p| !p.running.is_empty())
    }

    /// Makes a process with work current, if there is one. Returns true if others wait for the GPU.
    fn pick(&mut self) -> Option<bool> {
        let count = self.processes.len();
        let waiting = (0..count).filter(|at| self.has_work(*at)).count();
        if waiting == 0 {
            return None;
        }
        if !self.has_work(self.current) || self.slice_left_ns == 0 {
            let next = (1..=count).map(|by| (self.current + by) % count).find(|at| self.has_work(*at))?;
            if next != self.current {
                self.switch_left_ns = self.slices.switch_ns;
                self.current = next;
            }
            self.slice_left_ns = self.slices.slice_ns;
        }
        Some(waiting > 1)
    }

    fn shortest(&self) -> u64 {
        let Some(p) = self.processes.get(self.current) else { return u64::MAX };
        let left = p.running.iter().filter_map(|at| match p.streams.get(*at)?.queue.front()? {
            Work::Kernel { left_ns, .. } => Some(*left_ns),
            _ => None,
        });
        left.min().unwrap_or(u64::MAX)
    }

    /// Lets time pass until `until_ns`, or until a kernel or a gap ends if that comes first.
    pub fn advance(&mut self, until_ns: u64) {
        while let Some(Reverse((end_ns, process))) = self.gaps.peek().copied() {
            if end_ns > self.now_ns {
                break;
            }
            self.gaps.pop();
            self.start(process);
        }
        let until_ns = self.gaps.peek().map_or(until_ns, |Reverse((end_ns, _))| until_ns.min(*end_ns));
        while self.now_ns < until_ns {
            let Some(others) = self.pick() else {
                self.now_ns = until_ns;
                return;
            };
            let left = until_ns - self.now_ns;
            if self.switch_left_ns > 0 {
                let by = self.switch_left_ns.min(left);
                self.switch_left_ns -= by;
                self.now_ns += by;
                continue;
            }
            let slice = if others { self.slice_left_ns } else { u64::MAX };
            let by = self.shortest().min(slice).min(left);
            self.now_ns += by;
            self.slice_left_ns = self.slice_left_ns.saturating_sub(by);
            if self.run(by) {
                let current = self.current;
                self.start(current);
                return;
            }
        }
    }

    /// Runs the current process's kernels. Returns true if one ended.
    fn run(&mut self, by: u64) -> bool {
        let Some(p) = self.processes.get_mut(self.current) else { return false };
        p.used_ns += by;
        let (streams, width, mut ended) = (&mut p.streams, &mut p.width, 0);
        p.running.retain(|at| {
            let Some(stream) = streams.get_mut(*at) else { return false };
            if let Some(Work::Kernel { left_ns, width: w, .. }) = stream.queue.front_mut() {
                *left_ns = left_ns.saturating_sub(by);
                if *left_ns > 0 {
                    return true;
                }
                *width -= *w;
            }
            stream.queue.pop_front();
            stream.kernels -= 1;
            stream.runs = false;
            ended += 1;
            false
        });
        ended > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_passes_on_the_clock_and_is_nobodys_gpu_time() {
        let mut gpu = Gpu::new(Slices { slice_ns: 1_000, switch_ns: 0 }, 2, 1, 1);
        let start = gpu.now_ns();
        gpu.launch(0, 0, 100, WHOLE);
        gpu.idle(0, 0, 50);
        gpu.launch(0, 0, 100, WHOLE);
        gpu.record(0, 0, 0);
        while gpu.now_ns() < start + 1_000 {
            gpu.advance(start + 1_000);
        }
        assert_eq!((gpu.used_ns(0), gpu.event(0, 0)), (200, Some(start + 250)));
        // Meanwhile another process may run: its kernel of 30 ends before the second one begins.
        let start = gpu.now_ns();
        gpu.launch(0, 0, 100, WHOLE);
        gpu.idle(0, 0, 50);
        gpu.launch(0, 0, 100, WHOLE);
        gpu.record(0, 0, 0);
        gpu.launch(1, 0, 30, WHOLE);
        while gpu.now_ns() < start + 1_000 {
            gpu.advance(start + 1_000);
        }
        assert_eq!((gpu.used_ns(1), gpu.event(0, 0)), (30, Some(start + 250)));
    }
}
