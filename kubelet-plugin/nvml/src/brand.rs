//! Maps brands and architectures to names, in the spelling of NVIDIA's own DRA driver.

use aliquot_model::Architecture;
use nvml_wrapper::enum_wrappers::device::Brand;
use nvml_wrapper::enums::device::DeviceArchitecture;

/// Returns the value of the `brand` attribute.
pub(crate) fn brand_name(brand: Option<&Brand>) -> &'static str {
    match brand {
        None | Some(Brand::Unknown) => "Unknown",
        Some(Brand::Quadro) => "Quadro",
        Some(Brand::Tesla) => "Tesla",
        Some(Brand::NVS) => "NVS",
        Some(Brand::GRID) => "Grid",
        Some(Brand::GeForce) => "GeForce",
        Some(Brand::Titan) => "Titan",
        Some(Brand::VApps) => "NvidiaVApps",
        Some(Brand::VPC) => "NvidiaVPC",
        Some(Brand::VCS) => "NvidiaVCS",
        Some(Brand::VWS) => "NvidiaVWS",
        Some(Brand::CloudGaming | Brand::VGaming) => "NvidiaCloudGaming",
        Some(Brand::QuadroRTX) => "QuadroRTX",
        Some(Brand::NvidiaRTX) => "NvidiaRTX",
        Some(Brand::Nvidia) => "Nvidia",
        Some(Brand::GeForceRTX) => "GeForceRTX",
        Some(Brand::TitanRTX) => "TitanRTX",
    }
}

/// Returns the architecture from NVML's answer. If the library and the bindings are of different age and
/// NVML's answer is unknown, returns it from the compute capability.
pub(crate) fn architecture(told: Option<&DeviceArchitecture>, capability: (u32, u32)) -> Architecture {
    match told {
        Some(DeviceArchitecture::Volta) => Architecture::Volta,
        Some(DeviceArchitecture::Turing) => Architecture::Turing,
        Some(DeviceArchitecture::Ampere) => Architecture::Ampere,
        Some(DeviceArchitecture::Ada) => Architecture::Ada,
        Some(DeviceArchitecture::Hopper) => Architecture::Hopper,
        Some(DeviceArchitecture::Blackwell) => Architecture::Blackwell,
        Some(DeviceArchitecture::Kepler | DeviceArchitecture::Maxwell | DeviceArchitecture::Pascal) => {
            Architecture::Other
        }
        Some(DeviceArchitecture::Unknown) | None => match capability {
            (7, 5..) => Architecture::Turing,
            (7, _) => Architecture::Volta,
            (8, 9..) => Architecture::Ada,
            (8, _) => Architecture::Ampere,
            (9, _) => Architecture::Hopper,
            (10..=12, _) => Architecture::Blackwell,
            _ => Architecture::Other,
        },
    }
}

/// Returns the number of CUDA cores of a multiprocessor, from the programming guide's table of compute
/// capabilities.
pub(crate) fn cores_per_multiprocessor(capability: (u32, u32)) -> Option<u32> {
    match capability {
        (7, _) | (8, 0) => Some(64),
        (8..=12, _) => Some(128),
        _ => None,
    }
}

/// Returns true if a change of MIG mode waits for a reset of the GPU, as on the MIG boards of the first
/// generation only (A100, A30).
pub(crate) fn mig_mode_needs_reset(architecture: Architecture) -> bool {
    architecture <= Architecture::Ampere
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::t4((7, 5), Architecture::Turing, Some(64))]
    #[case::v100((7, 0), Architecture::Volta, Some(64))]
    #[case::a100((8, 0), Architecture::Ampere, Some(64))]
    #[case::a10((8, 6), Architecture::Ampere, Some(128))]
    #[case::l40s((8, 9), Architecture::Ada, Some(128))]
    #[case::h100((9, 0), Architecture::Hopper, Some(128))]
    #[case::b200((10, 0), Architecture::Blackwell, Some(128))]
    #[case::rtx_pro((12, 0), Architecture::Blackwell, Some(128))]
    #[case::p100((6, 0), Architecture::Other, None)]
    #[case::later((13, 0), Architecture::Other, None)]
    fn the_capability_stands_in_for_an_unknown_architecture(
        #[case] capability: (u32, u32),
        #[case] want: Architecture,
        #[case] cores: Option<u32>,
    ) {
        assert_eq!(architecture(None, capability), want);
        assert_eq!(architecture(Some(&DeviceArchitecture::Unknown), capability), want);
        assert_eq!(cores_per_multiprocessor(capability), cores);
    }

    #[test]
    fn only_the_first_mig_boards_need_a_reset() {
        assert!(mig_mode_needs_reset(Architecture::Ampere));
        assert!(!mig_mode_needs_reset(Architecture::Hopper));
        assert!(!mig_mode_needs_reset(Architecture::Blackwell));
        assert!(!mig_mode_needs_reset(Architecture::Other));
    }
}
