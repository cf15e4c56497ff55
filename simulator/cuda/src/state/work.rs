//! What streams and graphs are given to do.

use crate::codes::Code;
use crate::span::Bus;
use crate::transfer::Transfer;

/// A kernel launch as the program describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    /// First parameter, where a function takes its duration from it.
    pub(crate) parameter: u64,
}

/// A call into the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCall {
    pub(crate) function: usize,
    pub(crate) data: u64,
    /// The stream of `cuStreamAddCallback`, whose functions take it and a status.
    pub(crate) stream: Option<u64>,
}

/// What an operation does.
#[derive(Clone)]
pub(crate) enum Work {
    /// Occupies part of the GPU for some of the context's time; may end the context with an error.
    Kernel {
        cost_ns: u64,
        share: u32,
        fault: Option<Code>,
    },
    /// Moves or fills bytes when it is done.
    Transfer(Box<Transfer>),
    /// Gives an event its time, unless it was recorded again since.
    Record {
        event: u64,
        generation: u64,
    },
    /// Nothing: a point to wait for.
    Marker,
    Call(HostCall),
    /// Writes a word of 4 or 8 bytes.
    Write {
        transfer: Box<Transfer>,
    },
    /// Waits for a word of 4 or 8 bytes to fulfil a condition.
    Poll {
        address: u64,
        value: u64,
        wide: bool,
        condition: u32,
    },
    /// The end of a graph's launch.
    GraphEnd {
        exec: u64,
    },
}

impl Work {
    /// Can be planned ahead in the context's own time.
    pub(crate) fn is_planned(&self) -> bool {
        match self {
            Self::Kernel { .. } | Self::Record { .. } | Self::Marker | Self::GraphEnd { .. } => true,
            Self::Transfer(transfer) => transfer.route() == (Bus::Device, Bus::Device),
            Self::Write { .. } | Self::Call(_) | Self::Poll { .. } => false,
        }
    }

    /// Can be noticed without a call into the driver, or must be carried out at its time for another reason.
    pub(crate) fn is_noticed(&self) -> bool {
        match self {
            Self::Transfer(transfer) => transfer.route().1 == Bus::Host,
            Self::Write { .. } | Self::Call(_) | Self::Poll { .. } => true,
            Self::Kernel { fault, .. } => fault.is_some(),
            Self::Record { .. } | Self::Marker | Self::GraphEnd { .. } => false,
        }
    }
}
