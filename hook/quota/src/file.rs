//! The quota file: what one allocation result may use. The node agent writes it, the limiter reads it.
//!
//! The file has 256 bytes, little-endian; it is replaced by rename and read whole. The last eight bytes are a
//! checksum over everything before them.

use core::fmt;

/// Size of an encoded quota file, in bytes; a file of any other size is refused.
pub const QUOTA_FILE_SIZE: usize = 256;

/// The layout that this crate writes.
pub const QUOTA_LAYOUT_VERSION: u32 = 1;

/// Room for a GPU's UUID as text, zero padded, in bytes.
pub const UUID_SIZE: usize = 96;

const MAGIC: [u8; 8] = *b"ALQQUOTA";
const AT_VERSION: usize = 8;
const AT_SIZE: usize = 12;
const AT_GENERATION: usize = 16;
const AT_UUID: usize = 24;
const AT_MEMORY: usize = 120;
const AT_OVERSUBSCRIBE: usize = 128;
const AT_CORES: usize = 136;
const AT_POLICY: usize = 137;
const AT_PRIORITY: usize = 138;
const AT_FAIL_MODE: usize = 139;
const AT_ORDER: usize = 140;
const AT_RESERVED: usize = 142;
const AT_CHECKSUM: usize = QUOTA_FILE_SIZE - 8;

/// Why a quota file was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaError {
    /// The file does not have [`QUOTA_FILE_SIZE`] bytes. Holds its size.
    Size(usize),
    /// The file does not start with the magic bytes.
    Magic,
    /// The file has a layout version that this reader does not know.
    Version(u32),
    /// The checksum does not match the content.
    Checksum,
    /// The GPU's UUID is empty, too long, or contains something other than printable ASCII.
    Uuid,
    /// The percentage of compute is above 100. Holds that percentage.
    Cores(u8),
    /// A field holds a value that has no meaning in this layout. Holds the field's name.
    Field(&'static str),
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => write!(f, "quota file has {size} bytes instead of {QUOTA_FILE_SIZE}"),
            Self::Magic => f.write_str("quota file does not start with its magic bytes"),
            Self::Version(version) => write!(
                f,
                "quota file has unknown layout version {version}, version {QUOTA_LAYOUT_VERSION} is read here: node agent and limiter are of different releases"
            ),
            Self::Checksum => f.write_str("quota file is corrupt: its checksum does not match"),
            Self::Uuid => f.write_str("quota file names no valid GPU UUID"),
            Self::Cores(cores) => write!(f, "quota file grants {cores} percent of compute"),
            Self::Field(name) => write!(f, "quota file has an invalid value for {name}"),
        }
    }
}

impl core::error::Error for QuotaError {}

/// UUID of a GPU or MIG device as NVML prints it (`GPU-…` or `MIG-…`), held without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuUuid([u8; UUID_SIZE]);

impl GpuUuid {
    /// Creates a UUID from its text: 1 to 95 characters of printable ASCII without spaces.
    pub fn new(text: &str) -> Result<Self, QuotaError> {
        let mut bytes = [0; UUID_SIZE];
        let target = bytes.get_mut(..text.len()).ok_or(QuotaError::Uuid)?;
        target.copy_from_slice(text.as_bytes());
        Self::from_bytes(bytes)
    }

    /// Creates a UUID from the zero-padded form that the file stores.
    pub fn from_bytes(bytes: [u8; UUID_SIZE]) -> Result<Self, QuotaError> {
        let len = bytes.iter().position(|b| *b == 0).ok_or(QuotaError::Uuid)?;
        let (text, padding) = bytes.split_at(len);
        if text.is_empty() || !text.iter().all(u8::is_ascii_graphic) || padding.iter().any(|b| *b != 0) {
            return Err(QuotaError::Uuid);
        }
        Ok(Self(bytes))
    }

    /// Returns the UUID as text.
    pub fn as_str(&self) -> &str {
        let len = self.0.iter().position(|b| *b == 0).unwrap_or(UUID_SIZE);
        self.0.get(..len).and_then(|text| core::str::from_utf8(text).ok()).unwrap_or_default()
    }

    /// Returns true if this is the UUID of a MIG device; everything in the quota is then about that
    /// partition, not its GPU.
    pub fn is_partition(&self) -> bool {
        self.0.starts_with(b"MIG-")
    }

    /// Returns the UUID zero padded, as the file stores it.
    pub fn as_bytes(&self) -> &[u8; UUID_SIZE] {
        &self.0
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether a share may use idle time of the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum ComputePolicy {
    /// The share never gets more than its percentage.
    #[default]
    Hard = 0,
    /// The share may borrow time that no other share's quota claims.
    Soft = 1,
}

/// What the limiter does where it cannot work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum FailMode {
    /// CUDA does not start, and the limiter says why.
    #[default]
    Closed = 0,
    /// The program runs without limits. Only a DeviceClass may ask for it.
    Open = 1,
}

/// The quota of one allocation result on one GPU, or on one partition of a GPU; memory and time are then the
/// partition's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaFile {
    /// Layout version; [`QUOTA_LAYOUT_VERSION`] when written by this crate.
    pub version: u32,
    /// The number of this rewrite of the quota, by which a reader tells an older file from a newer one.
    pub generation: u64,
    /// The GPU or MIG device that the quota is for.
    pub gpu_uuid: GpuUuid,
    /// Bytes of device memory that the share may hold; 0 = no limit.
    pub memory_bytes: u64,
    /// Bytes of managed memory that the share may allocate on top of `memory_bytes`; 0 = none.
    pub oversubscribe_bytes: u64,
    /// Percent of the device's time; 0 = best effort, no limit.
    pub cores_percent: u8,
    /// Whether the share may borrow idle time.
    pub compute_policy: ComputePolicy,
    /// Order among the borrowers of idle time; higher goes first.
    pub priority: i8,
    /// What the limiter does where it cannot work.
    pub fail_mode: FailMode,
    /// Position among the claim's devices in CDI order: the `i` of `CUDA_DEVICE_MEMORY_LIMIT_<i>`.
    pub device_order: u16,
}

impl QuotaFile {
    /// Returns a quota for `gpu_uuid` without any limit, to be filled in by the caller.
    pub fn new(gpu_uuid: GpuUuid) -> Self {
        Self {
            version: QUOTA_LAYOUT_VERSION,
            generation: 1,
            gpu_uuid,
            memory_bytes: 0,
            oversubscribe_bytes: 0,
            cores_percent: 0,
            compute_policy: ComputePolicy::Hard,
            priority: 0,
            fail_mode: FailMode::Closed,
            device_order: 0,
        }
    }

    /// Returns the content of the quota file.
    pub fn encode(&self) -> [u8; QUOTA_FILE_SIZE] {
        let mut out = [0; QUOTA_FILE_SIZE];
        put(&mut out, 0, &MAGIC);
        put(&mut out, AT_VERSION, &self.version.to_le_bytes());
        put(&mut out, AT_SIZE, &(QUOTA_FILE_SIZE as u32).to_le_bytes());
        put(&mut out, AT_GENERATION, &self.generation.to_le_bytes());
        put(&mut out, AT_UUID, self.gpu_uuid.as_bytes());
        put(&mut out, AT_MEMORY, &self.memory_bytes.to_le_bytes());
        put(&mut out, AT_OVERSUBSCRIBE, &self.oversubscribe_bytes.to_le_bytes());
        put(&mut out, AT_CORES, &[self.cores_percent]);
        put(&mut out, AT_POLICY, &[self.compute_policy as u8]);
        put(&mut out, AT_PRIORITY, &self.priority.to_le_bytes());
        put(&mut out, AT_FAIL_MODE, &[self.fail_mode as u8]);
        put(&mut out, AT_ORDER, &self.device_order.to_le_bytes());
        let sum = checksum(out.get(..AT_CHECKSUM).unwrap_or_default());
        put(&mut out, AT_CHECKSUM, &sum.to_le_bytes());
        out
    }

    /// Reads the content of a quota file. Anything other than exactly what [`QuotaFile::encode`] writes is
    /// refused.
    pub fn decode(bytes: &[u8]) -> Result<Self, QuotaError> {
        // Another version may have another size, and the version says more.
        let head = bytes.first_chunk::<AT_SIZE>().ok_or(QuotaError::Size(bytes.len()))?;
        if !head.starts_with(&MAGIC) {
            return Err(QuotaError::Magic);
        }
        let version = head.last_chunk().copied().map_or(0, u32::from_le_bytes);
        if version != QUOTA_LAYOUT_VERSION {
            return Err(QuotaError::Version(version));
        }
        let bytes: &[u8; QUOTA_FILE_SIZE] = bytes.try_into().map_err(|_| QuotaError::Size(bytes.len()))?;
        let sum = checksum(bytes.get(..AT_CHECKSUM).unwrap_or_default());
        if sum != u64::from_le_bytes(take(bytes, AT_CHECKSUM)) {
            return Err(QuotaError::Checksum);
        }
        if u32::from_le_bytes(take(bytes, AT_SIZE)) as usize != QUOTA_FILE_SIZE {
            return Err(QuotaError::Field("size"));
        }
        if bytes.get(AT_RESERVED..AT_CHECKSUM).unwrap_or_default().iter().any(|b| *b != 0) {
            return Err(QuotaError::Field("reserved bytes"));
        }
        let [cores_percent] = take(bytes, AT_CORES);
        if cores_percent > 100 {
            return Err(QuotaError::Cores(cores_percent));
        }
        let compute_policy = match take(bytes, AT_POLICY) {
            [0] => ComputePolicy::Hard,
            [1] => ComputePolicy::Soft,
            _ => return Err(QuotaError::Field("compute policy")),
        };
        let fail_mode = match take(bytes, AT_FAIL_MODE) {
            [0] => FailMode::Closed,
            [1] => FailMode::Open,
            _ => return Err(QuotaError::Field("fail mode")),
        };
        Ok(Self {
            version,
            generation: u64::from_le_bytes(take(bytes, AT_GENERATION)),
            gpu_uuid: GpuUuid::from_bytes(take(bytes, AT_UUID))?,
            memory_bytes: u64::from_le_bytes(take(bytes, AT_MEMORY)),
            oversubscribe_bytes: u64::from_le_bytes(take(bytes, AT_OVERSUBSCRIBE)),
            cores_percent,
            compute_policy,
            priority: i8::from_le_bytes(take(bytes, AT_PRIORITY)),
            fail_mode,
            device_order: u16::from_le_bytes(take(bytes, AT_ORDER)),
        })
    }
}

fn put(out: &mut [u8; QUOTA_FILE_SIZE], at: usize, value: &[u8]) {
    if let Some(target) = out.get_mut(at..at + value.len()) {
        target.copy_from_slice(value);
    }
}

fn take<const N: usize>(bytes: &[u8; QUOTA_FILE_SIZE], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|part| part.try_into().ok()).unwrap_or([0; N])
}

/// Returns the FNV-1a hash. Each step is a bijection of the state, so any change of a single byte changes the
/// sum.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quota() -> impl Strategy<Value = QuotaFile> {
        (
            any::<u64>(),
            "(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
            any::<u64>(),
            any::<u64>(),
            0..=100u8,
            any::<bool>(),
            any::<i8>(),
            any::<bool>(),
            any::<u16>(),
        )
            .prop_map(
                |(generation, uuid, memory, over, cores_percent, soft, priority, open, device_order)| {
                    QuotaFile {
                        version: QUOTA_LAYOUT_VERSION,
                        generation,
                        gpu_uuid: GpuUuid::new(&uuid).unwrap(),
                        memory_bytes: memory,
                        oversubscribe_bytes: over,
                        cores_percent,
                        compute_policy: if soft { ComputePolicy::Soft } else { ComputePolicy::Hard },
                        priority,
                        fail_mode: if open { FailMode::Open } else { FailMode::Closed },
                        device_order,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn decode_of_encode_is_identity(quota in quota()) {
            prop_assert_eq!(QuotaFile::decode(&quota.encode()), Ok(quota));
        }

        #[test]
        fn any_changed_byte_is_refused(quota in quota(), at in 0..QUOTA_FILE_SIZE, flip in 1..=255u8) {
            let mut bytes = quota.encode();
            bytes[at] ^= flip;
            prop_assert!(QuotaFile::decode(&bytes).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(QuotaFile::decode(&bytes).is_err());
        }

        #[test]
        fn truncation_is_refused(quota in quota(), len in 0..QUOTA_FILE_SIZE) {
            prop_assert_eq!(QuotaFile::decode(&quota.encode()[..len]), Err(QuotaError::Size(len)));
        }
    }

    fn sample() -> QuotaFile {
        QuotaFile::new(GpuUuid::new("GPU-00000000-0000-0000-0000-000000000000").unwrap())
    }

    fn with_sum(mut bytes: [u8; QUOTA_FILE_SIZE]) -> [u8; QUOTA_FILE_SIZE] {
        let sum = checksum(&bytes[..AT_CHECKSUM]);
        put(&mut bytes, AT_CHECKSUM, &sum.to_le_bytes());
        bytes
    }

    #[test]
    fn values_without_meaning_are_refused_even_with_a_valid_checksum() {
        let at = |offset: usize, value: u8| {
            let mut bytes = sample().encode();
            bytes[offset] = value;
            QuotaFile::decode(&with_sum(bytes))
        };
        assert_eq!(at(AT_CORES, 101), Err(QuotaError::Cores(101)));
        assert_eq!(at(AT_POLICY, 2), Err(QuotaError::Field("compute policy")));
        assert_eq!(at(AT_FAIL_MODE, 2), Err(QuotaError::Field("fail mode")));
        assert_eq!(at(AT_RESERVED, 1), Err(QuotaError::Field("reserved bytes")));
        assert_eq!(at(AT_SIZE, 1), Err(QuotaError::Field("size")));
        assert_eq!(at(AT_VERSION, 2), Err(QuotaError::Version(2)));
        assert_eq!(at(AT_UUID, 0), Err(QuotaError::Uuid));
        assert_eq!(at(AT_UUID + 95, b'x'), Err(QuotaError::Uuid));
    }

    /// Numbers without a pattern, the same in every run.
    fn random(seed: &mut u64) -> u64 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed
    }

    #[test]
    fn a_million_mutations_decode_to_what_they_say_or_not_at_all() {
        let mut seed = 0x0123_4567_89ab_cdef;
        let mut decoded = 0_u32;
        // Miri is a thousand times slower.
        let rounds = if cfg!(miri) { 100 } else { 1_000_000 };
        for _ in 0..rounds {
            let mut bytes = sample().encode();
            for _ in 0..=random(&mut seed) % 6 {
                let at = (random(&mut seed) % AT_CHECKSUM as u64) as usize;
                bytes[at] = [0, 1, 0xff, random(&mut seed) as u8][(random(&mut seed) % 4) as usize];
            }
            // As a writer that is wrong and not unlucky would leave it: only values can tell.
            let bytes = with_sum(bytes);
            if let Ok(quota) = QuotaFile::decode(&bytes) {
                decoded += 1;
                assert_eq!(quota.encode(), bytes, "nothing was passed over");
                assert!(quota.cores_percent <= 100);
            }
        }
        assert!(decoded > rounds / 100, "{decoded} of the mutations were quotas");
    }

    #[test]
    fn the_layout_of_version_1_is_frozen() {
        let mut quota = sample();
        quota.generation = 7;
        quota.memory_bytes = 0x0102_0304_0506_0708;
        quota.cores_percent = 30;
        quota.priority = -2;
        quota.device_order = 3;
        let bytes = quota.encode();
        assert_eq!(&bytes[..16], b"ALQQUOTA\x01\0\0\0\0\x01\0\0");
        assert_eq!(bytes[16], 7);
        assert_eq!(&bytes[24..28], b"GPU-");
        assert_eq!(&bytes[120..128], &[8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(&bytes[136..144], &[30, 0, 254, 0, 3, 0, 0, 0]);
    }

    #[test]
    fn uuid_text_is_bounded_and_printable() {
        assert!(GpuUuid::new("").is_err());
        assert!(GpuUuid::new("GPU 1").is_err());
        assert!(GpuUuid::new(&"x".repeat(UUID_SIZE)).is_err());
        assert_eq!(GpuUuid::new(&"x".repeat(UUID_SIZE - 1)).unwrap().as_str().len(), UUID_SIZE - 1);
    }
}
