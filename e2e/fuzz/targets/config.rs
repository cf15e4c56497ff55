//! Opaque parameters of claims and classes: decoding ends, and what decodes encodes to what decodes to the same.
#![no_main]

use aliquot_fuzz::seeds;
use aliquot_model::config::{AllocationPolicy, Config, GpuConfig, MigConfig, MpsConfig, ShareConfig, VfioConfig};
use aliquot_model::config::{decode_lenient, decode_strict};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fn encoded() -> Vec<Vec<u8>> {
    let all = [
        Config::Gpu(GpuConfig::default()),
        Config::Mig(MigConfig::default()),
        Config::Share(ShareConfig::default()),
        Config::Mps(MpsConfig::default()),
        Config::Policy(AllocationPolicy::default()),
        Config::Vfio(VfioConfig::default()),
    ];
    all.iter().map(|config| config.encode().to_string().into_bytes()).collect()
}

fuzz_target!(init: seeds(encoded), |bytes: &[u8]| {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
    let strict = decode_strict(&value);
    if let Ok(config) = &strict {
        assert_eq!(decode_strict(&config.encode()).as_ref(), Ok(config), "{value}");
        assert_eq!(decode_lenient(&value).as_ref(), Ok(config), "what is read strictly is read leniently: {value}");
    }
    if let Ok(config) = decode_lenient(&value) {
        assert_eq!(decode_lenient(&config.encode()), Ok(config), "{value}");
    }
});
