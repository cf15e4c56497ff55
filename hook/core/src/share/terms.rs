//! What a share may have: its quota, and what the node agent grants. Both come from files that no container
//! can write.

use super::Share;
use super::bytes::Kind;
use super::files::{read_grant, read_quota};
use crate::sys;
use aliquot_quota::grant::Grant;
use aliquot_quota::{ComputePolicy, FailMode, QuotaFile};
use core::sync::atomic::Ordering::Relaxed;

/// The age at which a grant is read again, in milliseconds.
const GRANT_AGE_MS: u64 = 10;

/// The age at which the quota file is read again, in milliseconds.
const QUOTA_AGE_MS: u64 = 500;

impl Share {
    pub(super) fn take(&self, quota: &QuotaFile) {
        let limit = if quota.memory_bytes == 0 { u64::MAX } else { quota.memory_bytes };
        self.file_limit.store(limit, Relaxed);
        self.oversubscription.store(quota.oversubscribe_bytes, Relaxed);
        self.percent.store(u32::from(quota.cores_percent), Relaxed);
        self.is_soft.store(u32::from(quota.compute_policy == ComputePolicy::Soft), Relaxed);
        self.fail_open.store(u32::from(quota.fail_mode == FailMode::Open), Relaxed);
        self.checked_ms.store(sys::coarse_ms(), Relaxed);
    }

    /// Lowers the limit to `bytes`, which the environment says.
    pub(crate) fn lower(&self, bytes: u64) {
        self.env_limit.fetch_min(bytes, Relaxed);
    }

    /// Returns the bytes that may be charged; `u64::MAX` = any number. Reads the quota file again when it is
    /// time.
    pub(crate) fn limit(&self) -> u64 {
        self.limit_at(sys::coarse_ms())
    }

    /// Does what [`Share::limit`] does, where the time is known already.
    fn limit_at(&self, now_ms: u64) -> u64 {
        self.renew(now_ms);
        self.file_limit.load(Relaxed).min(self.env_limit.load(Relaxed))
    }

    pub(super) fn limit_of(&self, kind: Kind, now_ms: u64) -> u64 {
        let limit = self.limit_at(now_ms);
        match kind {
            Kind::Device => limit,
            Kind::Managed => limit.saturating_add(self.oversubscription.load(Relaxed)),
        }
    }

    /// Returns the percent of the GPU's time; 0 = no limit. Reads the quota file again when it is time.
    pub(crate) fn percent(&self) -> u8 {
        self.renew(sys::coarse_ms());
        self.percent.load(Relaxed) as u8
    }

    /// Returns the node agent's grant. If there is none or it has run out, the grant has nothing but the
    /// corrections found so far.
    pub(crate) fn grant(&self, now_ns: u64) -> Grant {
        let (now_ms, checked) = (now_ns / 1_000_000, self.grant_checked_ms.load(Relaxed));
        let [until, terms, up, borrowed_up, beside] = &self.granted;
        let age = if until.load(Relaxed) == 0 { QUOTA_AGE_MS } else { GRANT_AGE_MS };
        if checked == 0 || now_ms.wrapping_sub(checked) >= age {
            self.grant_checked_ms.store(now_ms, Relaxed);
            let path = *self.grant_path.lock();
            if let Some(read) = read_grant(&path) {
                until.store(read.valid_until_ns, Relaxed);
                let own = u64::from(read.own_permille) << 16;
                terms.store(u64::from(read.slice_us) << 32 | own | u64::from(read.borrow_percent), Relaxed);
                up.store(read.true_up_ns as u64, Relaxed);
                borrowed_up.store(read.borrowed_true_up_ns as u64, Relaxed);
                beside.store(read.beside_ns, Relaxed);
            }
        }
        let (valid_until_ns, terms) = (until.load(Relaxed), terms.load(Relaxed));
        let (true_up_ns, borrowed_true_up_ns) = (up.load(Relaxed) as i64, borrowed_up.load(Relaxed) as i64);
        if valid_until_ns <= now_ns {
            // Corrections that were found stay valid after the grant has run out.
            return Grant { true_up_ns, borrowed_true_up_ns, ..Grant::default() };
        }
        let borrow_percent = if self.is_soft.load(Relaxed) == 0 { 0 } else { terms as u8 };
        let (own_permille, slice_us) = ((terms >> 16) as u16, (terms >> 32) as u32);
        let beside_ns = beside.load(Relaxed);
        Grant {
            valid_until_ns,
            borrow_percent,
            own_permille,
            slice_us,
            true_up_ns,
            borrowed_true_up_ns,
            beside_ns,
        }
    }

    fn renew(&self, now: u64) {
        if now.wrapping_sub(self.checked_ms.load(Relaxed)) >= QUOTA_AGE_MS {
            self.checked_ms.store(now, Relaxed);
            let path = *self.quota_path.lock();
            // A file that cannot be read leaves the limit as it was; if a newer node agent wrote it, the
            // limiter says so.
            match read_quota(&path) {
                Ok(quota) if self.uuid() == Some(quota.gpu_uuid) => self.take(&quota),
                Err(reason) if sys::File::read_only(path.as_c()).is_ok() => {
                    crate::log::note(format_args!("the limits stay as they were: {reason}"));
                }
                _ => {}
            }
        }
    }

    /// Returns the most bytes that any process of the share may charge now: another process may have read a
    /// newer quota, or have managed memory.
    pub(super) fn widest(&self) -> u64 {
        let path = *self.quota_path.lock();
        if let Ok(quota) = read_quota(&path)
            && self.uuid() == Some(quota.gpu_uuid)
        {
            self.take(&quota);
        }
        self.file_limit.load(Relaxed).saturating_add(self.oversubscription.load(Relaxed))
    }
}
