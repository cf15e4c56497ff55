//! The shared state file: fixed size, plain integers only, all-zero is a node without instances.
//!
//! Everything in [`State`] is read and written under the node's lock. What must work without it
//! (the fast path of kernels sharing a GPU) lives in the compute area behind it, as atomics.

/// Most GPUs on a node.
pub const MAX_GPUS: usize = 16;
/// Most GPU instances on a GPU; ids are 0 to 14.
pub const MAX_GIS: usize = 15;
/// Most compute instances in a GPU instance.
pub const MAX_CIS: usize = 8;
/// Most processes that use the node at one time.
pub const MAX_PROCS: usize = 256;
/// Most memory objects that are shared between processes at one time.
pub const MAX_SHARED: usize = 2048;
/// Most fault rules at one time.
pub const MAX_FAULTS: usize = 64;
/// Length of the event ring.
pub const MAX_EVENTS: usize = 256;
/// Memory pools of a GPU for one process: the whole GPU, then each GPU instance.
pub const MAX_POOLS: usize = MAX_GIS + 1;
/// "ALQSIM" and the layout's version.
pub const MAGIC: u64 = 0x414c_5153_494d_0006;
/// Where the compute area starts in the state file.
pub const COMPUTE_OFFSET: usize = 4 << 20;
/// Size of the compute area.
pub const COMPUTE_BYTES: usize = 4 << 20;
/// Size of the state file.
pub const STATE_FILE_BYTES: usize = COMPUTE_OFFSET + COMPUTE_BYTES;

/// A compute instance; `in_use` 0 means that the rest means nothing.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CiState {
    /// 1 where the instance exists.
    pub in_use: u32,
    /// Profile id.
    pub profile: u32,
    /// First compute slice inside the GPU instance.
    pub start: u32,
    /// Compute slices.
    pub size: u32,
}

/// A GPU instance.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GiState {
    /// 1 where the instance exists.
    pub in_use: u32,
    /// `lgip` id of its profile.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Memory slices.
    pub size: u32,
    /// Counts creations on this id, so that a handle from before is told apart.
    pub serial: u64,
    /// Its compute instances.
    pub cis: [CiState; MAX_CIS],
}

/// What changes about a GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GpuState {
    /// Current MIG mode.
    pub mig_current: u32,
    /// MIG mode after the next reset.
    pub mig_pending: u32,
    /// NVML compute mode.
    pub compute_mode: u32,
    /// Persistence mode.
    pub persistence: u32,
    /// Time-slice setting as `nvidia-smi compute-policy` takes it: 0 default, 1 short, 2 medium, 3 long.
    pub timeslice: u32,
    /// 1 after it fell off the bus.
    pub lost: u32,
    /// 1 while another driver has it.
    pub away: u32,
    /// Minor number plus 1 where it got another one since the driver was loaded, else 0.
    pub moved: u32,
    /// Corrected ECC errors since boot.
    pub ecc_corrected: u64,
    /// Uncorrected ECC errors since boot.
    pub ecc_uncorrected: u64,
    /// GPU instances by id.
    pub gis: [GiState; MAX_GIS],
}

/// Memory of one process in one pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PoolUse {
    /// Bytes that only this process holds.
    pub bytes: u64,
    /// Live contexts.
    pub contexts: u32,
    /// Compute instance id of the latest context.
    pub ci: u32,
}

/// A process that uses the node.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcSlot {
    /// 1 where the slot is taken.
    pub in_use: u32,
    /// Pid as the process itself sees it.
    pub own_pid: i32,
    /// Pid as the node's creator sees it; 0 while unknown.
    pub host_pid: i32,
    /// The MPS control daemon that it is a client of ([`crate::Node::join_mps`]); 0 where it is none's.
    pub mps_daemon: u32,
    /// Tells this program image from every other.
    pub token: u64,
    /// When it was found dead, on the monotonic clock; 0 while alive.
    pub dead_since_ns: u64,
    /// Inode of its pid namespace.
    pub pid_namespace: u64,
    /// First bytes of its command name, zero-terminated.
    pub name: [u8; 16],
    /// Memory by GPU and pool.
    pub pools: [[PoolUse; MAX_POOLS]; MAX_GPUS],
}

impl ProcSlot {
    /// A free slot.
    pub const EMPTY: Self = Self {
        in_use: 0,
        own_pid: 0,
        host_pid: 0,
        mps_daemon: 0,
        token: 0,
        dead_since_ns: 0,
        pid_namespace: 0,
        name: [0; 16],
        pools: [[PoolUse { bytes: 0, contexts: 0, ci: 0 }; MAX_POOLS]; MAX_GPUS],
    };
}

/// Memory that more than one process may hold.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SharedSlot {
    /// Its id; 0 where the slot is free.
    pub id: u64,
    /// Bytes.
    pub bytes: u64,
    /// GPU index.
    pub gpu: u32,
    /// Pool: 0 the whole GPU, else GPU instance id + 1.
    pub pool: u32,
    /// Which process slots hold it, one bit each.
    pub holders: [u64; MAX_PROCS / 64],
    /// Process slot that its bytes are reported under.
    pub payer: u32,
    /// Free for the user of the object.
    pub tag: u32,
}

/// One fault to inject.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FaultSlot {
    /// Id by which it can be removed; 0 where the slot is free.
    pub id: u64,
    /// Function name, zero-terminated.
    pub function: [u8; 80],
    /// Calls of that function since the rule was made.
    pub calls: u64,
    /// First call that fails or is delayed, from 1.
    pub nth: u64,
    /// How many calls from there on; `u64::MAX` for ever.
    pub times: u64,
    /// Microseconds to wait before the call does anything.
    pub delay_us: u64,
    /// Code to return.
    pub code: i32,
    /// 1 where `code` counts.
    pub fails: u32,
    /// Index of the only GPU whose calls are hit, plus 1; 0 for calls on any GPU or none.
    pub gpu: u64,
}

/// One event of the ring.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EventSlot {
    /// Its number, from 1; 0 where nothing was written.
    pub number: u64,
    /// NVML event type bit.
    pub kind: u64,
    /// XID number, or what else the type carries.
    pub data: u64,
    /// GPU index.
    pub gpu: u32,
    /// GPU instance, `u32::MAX` where none.
    pub gi: u32,
    /// Compute instance, `u32::MAX` where none.
    pub ci: u32,
    /// Keeps the size a multiple of eight.
    pub reserved: u32,
}

/// The part of the file that the lock protects.
#[repr(C)]
pub struct State {
    /// [`MAGIC`].
    pub magic: u64,
    /// Counts boots, from 1.
    pub boot: u64,
    /// The kernel's boot id of this boot, as text.
    pub boot_id: [u8; 40],
    /// Inode of the pid namespace that the node belongs to.
    pub host_pid_namespace: u64,
    /// How long a dead process's memory stays, in nanoseconds.
    pub reap_delay_ns: u64,
    /// A [`crate::ProcessView`] by its place in the declaration.
    pub process_view: u32,
    /// 1 where MIG management is refused in containers.
    pub deny_mig_in_containers: u32,
    /// Fault rules in force; read without the lock.
    pub faults_active: u32,
    /// Low half of the number of the newest event; waited on as a futex.
    pub event_futex: u32,
    /// How often the kernel module was loaded and unloaded since the node was made; odd while it is not loaded. Read
    /// without the lock.
    pub module: u32,
    /// Keeps the next field aligned.
    pub reserved: u32,
    /// Number of the newest event.
    pub last_event: u64,
    /// Number of the latest fault rule.
    pub last_fault: u64,
    /// Number of the latest shared object.
    pub last_shared: u64,
    /// When dead processes were last looked for.
    pub last_reap_ns: u64,
    /// The GPUs.
    pub gpus: [GpuState; MAX_GPUS],
    /// The processes.
    pub procs: [ProcSlot; MAX_PROCS],
    /// Shared memory objects.
    pub shared: [SharedSlot; MAX_SHARED],
    /// Faults.
    pub faults: [FaultSlot; MAX_FAULTS],
    /// Events.
    pub events: [EventSlot; MAX_EVENTS],
}

const _: () = {
    assert!(size_of::<State>() <= COMPUTE_OFFSET);
    assert!(align_of::<State>() == 8);
    assert!(COMPUTE_OFFSET.is_multiple_of(4096));
};
