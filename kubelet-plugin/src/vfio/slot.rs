//! Decides what has to be written so that a GPU goes from its driver to vfio-pci and back, given the kernel's
//! data on its IOMMU group. Pure: it does no I/O.
//!
//! A virtual machine gets the whole group, so nothing in it may be in other hands. A function of another card
//! is never unbound for it, and another GPU is never given away with it.

use super::VfioError;

/// The driver that hands PCI devices to user space.
pub const VFIO_PCI: &str = "vfio-pci";
/// NVIDIA's driver, as the kernel lists it.
pub const NVIDIA: &str = "nvidia";
/// The drivers that functions of a group may have (`Documentation/driver-api/vfio.rst`); functions without a
/// driver are harmless, too.
const HARMLESS: [&str; 3] = [VFIO_PCI, "pci-stub", "pcieport"];

/// PCI base classes, the upper byte of a class code.
const DISPLAY: u32 = 0x03;
const BRIDGE: u32 = 0x06;

/// One PCI function of an IOMMU group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// The PCI address, such as `0000:17:00.0`.
    pub address: String,
    /// The class code, such as `0x030200`.
    pub class: u32,
    /// The driver that the function is bound to.
    pub driver: Option<String>,
    /// The only driver that the function may be bound to, if one is set.
    pub wanted: Option<String>,
    /// True if the function is a virtual function of another one.
    pub is_virtual: bool,
}

impl Function {
    fn base_class(&self) -> u32 {
        self.class >> 16
    }

    fn is_on(&self, driver: &str) -> bool {
        self.driver.as_deref() == Some(driver)
    }

    fn is_kept_for_vfio(&self) -> bool {
        self.wanted.as_deref() == Some(VFIO_PCI)
    }
}

/// A GPU with its IOMMU group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The PCI address of the GPU.
    pub gpu: String,
    /// The number of the group; `None` if no IOMMU is on.
    pub number: Option<u32>,
    /// The functions in the group, including the GPU.
    pub functions: Vec<Function>,
}

impl Group {
    /// Returns the driver that the GPU is bound to.
    pub fn driver(&self) -> Option<&str> {
        self.functions.iter().find(|function| function.address == self.gpu)?.driver.as_deref()
    }

    /// Returns true if the GPU is bound to vfio-pci.
    pub fn is_on_vfio(&self) -> bool {
        self.driver() == Some(VFIO_PCI)
    }

    /// Returns true if a function belongs to the GPU's own card: the GPU, or its sound or USB controller.
    fn is_own(&self, function: &Function) -> bool {
        let slot = |address: &str| address.rsplit_once('.').map(|(slot, _)| slot.to_owned());
        !function.is_virtual && slot(&function.address) == slot(&self.gpu)
    }

    /// Returns the card's functions, the GPU first.
    fn own(&self) -> impl Iterator<Item = &Function> {
        let is_gpu = |function: &&Function| function.address == self.gpu;
        let gpu = self.functions.iter().filter(is_gpu);
        let others = self.functions.iter().filter(move |f| self.is_own(f) && !is_gpu(f));
        gpu.chain(others)
    }

    /// Returns the writes that make the group ready for the virtual machine.
    ///
    /// # Errors
    /// Fails with [`VfioError`] if the group cannot be used; nothing must be written then.
    pub fn bind(&self) -> Result<Vec<Write>, VfioError> {
        let Some(group) = self.number else {
            return Err(VfioError::NoGroup { address: self.gpu.clone() });
        };
        for other in self.functions.iter().filter(|function| !self.is_own(function)) {
            let refuse = |driver: &str| VfioError::Neighbour {
                address: self.gpu.clone(),
                group,
                neighbour: other.address.clone(),
                driver: driver.to_owned(),
            };
            match other.driver.as_deref() {
                _ if other.base_class() == BRIDGE => {}
                driver if other.base_class() == DISPLAY => return Err(refuse(driver.unwrap_or("no driver"))),
                None => {}
                Some(driver) if HARMLESS.contains(&driver) => {}
                Some(driver) => return Err(refuse(driver)),
            }
        }
        let mut writes = Vec::new();
        for function in
            self.own().filter(|function| !function.is_on(VFIO_PCI) || !function.is_kept_for_vfio())
        {
            let address = function.address.clone();
            if !function.is_kept_for_vfio() {
                writes.push(Write::Keep { address: address.clone(), driver: Some(VFIO_PCI) });
            }
            if function.is_on(VFIO_PCI) {
                continue;
            }
            if function.driver.is_some() {
                writes.push(Write::Unbind { address: address.clone() });
            }
            writes.push(Write::Probe { address });
        }
        Ok(writes)
    }

    /// Returns the writes that give the card's functions back to their own drivers. They are right from every
    /// state that [`Self::bind`] or this function left half done. Returns no writes if nothing has to change.
    pub fn release(&self) -> Vec<Write> {
        let mut writes = Vec::new();
        let is_taken = |function: &Function| function.is_on(VFIO_PCI) || function.is_kept_for_vfio();
        let gpu_is_away = self.own().take(1).any(|gpu| is_taken(gpu) || gpu.driver.is_none());
        // The GPU comes last: until it is back, a function of the card without a driver may be one that this
        // driver unbound.
        let (gpu, others): (Vec<_>, Vec<_>) = self.own().partition(|function| function.address == self.gpu);
        for function in others.into_iter().chain(gpu) {
            let address = function.address.clone();
            if function.is_kept_for_vfio() {
                writes.push(Write::Keep { address: address.clone(), driver: None });
            }
            if function.is_on(VFIO_PCI) {
                writes.push(Write::Unbind { address: address.clone() });
            }
            if (is_taken(function) || gpu_is_away) && (function.driver.is_none() || function.is_on(VFIO_PCI))
            {
                writes.push(Write::Probe { address });
            }
        }
        writes
    }
}

/// One write into sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Lets only this driver bind the function from now on or, without one, any driver that knows it.
    Keep {
        /// The address of the function.
        address: String,
        /// The driver.
        driver: Option<&'static str>,
    },
    /// Unbinds the function from its driver.
    Unbind {
        /// The address of the function.
        address: String,
    },
    /// Makes the kernel look for a driver.
    Probe {
        /// The address of the function.
        address: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const GPU: &str = "0000:17:00.0";
    const SOUND: &str = "0000:17:00.1";

    fn function(address: &str, class: u32, driver: Option<&str>, wanted: Option<&str>) -> Function {
        let text = |text: Option<&str>| text.map(str::to_owned);
        Function {
            address: address.into(),
            class,
            driver: text(driver),
            wanted: text(wanted),
            is_virtual: false,
        }
    }

    fn gpu(driver: Option<&str>, wanted: Option<&str>) -> Function {
        function(GPU, 0x03_02_00, driver, wanted)
    }

    fn group(functions: impl IntoIterator<Item = Function>) -> Group {
        Group { gpu: GPU.into(), number: Some(15), functions: functions.into_iter().collect() }
    }

    /// As a shell would show them.
    fn text(writes: &[Write]) -> Vec<String> {
        let one = |write: &Write| match write {
            Write::Keep { address, driver } => format!("keep {address} {}", driver.unwrap_or("-")),
            Write::Unbind { address } => format!("unbind {address}"),
            Write::Probe { address } => format!("probe {address}"),
        };
        writes.iter().map(|write| one(write).replace("0000:17:00.", ".")).collect()
    }

    const V: Option<&str> = Some(VFIO_PCI);
    const N: Option<&str> = Some(NVIDIA);

    #[rstest]
    #[case::untouched(N, None, &["keep .0 vfio-pci", "unbind .0", "probe .0"], &[])]
    #[case::only_kept(N, V, &["unbind .0", "probe .0"], &["keep .0 -"])]
    #[case::unbound(None, V, &["probe .0"], &["keep .0 -", "probe .0"])]
    #[case::bound(V, V, &[], &["keep .0 -", "unbind .0", "probe .0"])]
    #[case::half_given_back(V, None, &["keep .0 vfio-pci"], &["unbind .0", "probe .0"])]
    #[case::without_any(None, None, &["keep .0 vfio-pci", "probe .0"], &["probe .0"])]
    fn from_every_state_both_ways_lead_to_the_end(
        #[case] driver: Option<&str>,
        #[case] wanted: Option<&str>,
        #[case] bind: &[&str],
        #[case] release: &[&str],
    ) {
        let group = group([gpu(driver, wanted)]);
        assert_eq!(text(&group.bind().unwrap()), bind);
        assert_eq!(text(&group.release()), release);
    }

    #[test]
    fn the_cards_own_sound_goes_with_it_and_comes_back() {
        let sound = |driver, wanted| function(SOUND, 0x04_03_00, driver, wanted);
        let before = group([sound(Some("snd_hda_intel"), None), gpu(N, None)]);
        assert_eq!(
            text(&before.bind().unwrap()),
            ["keep .0 vfio-pci", "unbind .0", "probe .0", "keep .1 vfio-pci", "unbind .1", "probe .1"]
        );
        assert_eq!(text(&before.release()), Vec::<String>::new());
        let bound = group([sound(V, V), gpu(V, V)]);
        assert_eq!(
            text(&bound.release()),
            ["keep .1 -", "unbind .1", "probe .1", "keep .0 -", "unbind .0", "probe .0"]
        );
        let half_way = group([sound(None, None), gpu(V, V)]);
        assert_eq!(text(&half_way.release()), ["probe .1", "keep .0 -", "unbind .0", "probe .0"]);
        let never_bound = group([sound(None, None), gpu(N, None)]);
        assert_eq!(text(&never_bound.release()), Vec::<String>::new());
    }

    #[rstest]
    #[case::bridge(0x06_04_00, Some("pcieport"), true)]
    #[case::bridge_without_driver(0x06_04_00, None, true)]
    #[case::free_device(0x02_00_00, None, true)]
    #[case::device_on_vfio(0x02_00_00, Some("vfio-pci"), true)]
    #[case::network_card(0x02_00_00, Some("mlx5_core"), false)]
    #[case::other_gpu(0x03_02_00, Some("nvidia"), false)]
    #[case::other_gpu_without_driver(0x03_00_00, None, false)]
    #[case::other_gpu_on_vfio(0x03_02_00, Some("vfio-pci"), false)]
    fn what_else_is_in_the_group_must_be_nobodys(
        #[case] class: u32,
        #[case] driver: Option<&str>,
        #[case] allowed: bool,
    ) {
        let group = group([function("0000:18:00.0", class, driver, None), gpu(N, None)]);
        match group.bind() {
            Ok(writes) => {
                assert!(allowed);
                assert!(
                    text(&writes).iter().all(|write| write.contains(" .0")),
                    "the other one is left alone"
                );
            }
            Err(error) => {
                assert!(!allowed, "{error}");
                let text = error.to_string();
                assert!(text.contains("0000:18:00.0") && text.contains("group 15"), "{text}");
            }
        }
        assert_eq!(text(&group.release()), Vec::<String>::new());
    }

    #[test]
    fn virtual_functions_of_the_card_are_not_its_own() {
        let mut virtual_function = function("0000:17:00.4", 0x03_02_00, Some("nvidia"), None);
        virtual_function.is_virtual = true;
        assert!(group([gpu(N, None), virtual_function]).bind().is_err());
    }

    #[test]
    fn without_an_iommu_there_is_nothing_to_give() {
        let bare = Group { number: None, ..group([gpu(N, None)]) };
        let text = bare.bind().unwrap_err().to_string();
        assert!(text.contains("intel_iommu=on"), "{text}");
    }
}
