//! The functions of nvrtc.h that the project looks up.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::compile::{CompileError, compile, version};

/// `nvrtcResult`.
type Code = c_int;
const SUCCESS: Code = 0;
const INVALID_INPUT: Code = 3;
const INVALID_PROGRAM: Code = 4;
const INVALID_OPTION: Code = 5;
const COMPILATION: Code = 6;
const INTERNAL: Code = 11;

/// What a handle points to.
struct Program {
    name: String,
    source: String,
    log: Vec<u8>,
    image: Vec<u8>,
    ptx: Vec<u8>,
}

/// Runs `body` on the program of a handle; a panic is an internal error.
///
/// # Safety
/// `handle` is null or one of `nvrtcCreateProgram`'s that is not destroyed, used by this call alone.
unsafe fn with(handle: *mut c_void, body: impl FnOnce(&mut Program) -> Code) -> Code {
    // SAFETY: the caller's promise.
    let Some(program) = (unsafe { handle.cast::<Program>().as_mut() }) else {
        return INVALID_PROGRAM;
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(program))).unwrap_or(INTERNAL)
}

/// The text of a C string, `None` for null.
///
/// # Safety
/// `text` is null or NUL-terminated.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The name of a result.
#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(code: Code) -> *const c_char {
    let name = match code {
        SUCCESS => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        INTERNAL => c"NVRTC_ERROR_INTERNAL_ERROR",
        _ => c"NVRTC_ERROR unknown",
    };
    name.as_ptr()
}

/// Says 13.0.
///
/// # Safety
/// Both are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Code {
    // SAFETY: the caller's promise.
    match unsafe { (major.as_mut(), minor.as_mut()) } {
        (Some(major), Some(minor)) => {
            (*major, *minor) = (13, 0);
            SUCCESS
        }
        _ => INVALID_INPUT,
    }
}

/// Takes a source. Headers are not taken.
///
/// # Safety
/// `program` is null or valid for a write; the strings are null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut c_void,
    source: *const c_char,
    name: *const c_char,
    headers: c_int,
    _header_texts: *const *const c_char,
    _header_names: *const *const c_char,
) -> Code {
    // SAFETY: the caller's promise.
    let (source, name) = unsafe { (text(source), text(name)) };
    let (Some(source), false, 0) = (source, program.is_null(), headers) else {
        return INVALID_INPUT;
    };
    let name = name.unwrap_or_else(|| "default_program".into());
    let (log, image, ptx) = Default::default();
    let made = Box::into_raw(Box::new(Program { name, source, log, image, ptx }));
    // SAFETY: not null, and the caller's promise.
    unsafe { program.write(made.cast()) };
    SUCCESS
}

/// Drops a program and clears the handle.
///
/// # Safety
/// `program` is null or points to a handle of `nvrtcCreateProgram`'s, not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut c_void) -> Code {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { program.as_mut() }).filter(|handle| !handle.is_null()) else {
        return INVALID_PROGRAM;
    };
    // SAFETY: made by `Box::into_raw` and dropped once, since the handle is cleared.
    drop(unsafe { Box::from_raw(handle.cast::<Program>()) });
    *handle = std::ptr::null_mut();
    SUCCESS
}

/// Compiles.
///
/// # Safety
/// A live program; `options` holds `count` NUL-terminated strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut c_void,
    count: c_int,
    options: *const *const c_char,
) -> Code {
    let count = if options.is_null() { 0 } else { count.max(0) as usize };
    // SAFETY: the caller's promise.
    let options: Vec<String> =
        (0..count).filter_map(|at| unsafe { text(options.add(at).read()) }).collect();
    // SAFETY: the caller's promise.
    unsafe { with(program, |program| program.compile(&options)) }
}

impl Program {
    fn compile(&mut self, options: &[String]) -> Code {
        let arch = match arch_of(options) {
            Ok(arch) => arch,
            Err(option) => {
                self.log = format!("error: unrecognized option {option}\0").into_bytes();
                return INVALID_OPTION;
            }
        };
        self.ptx = format!(
            "//\n// Made by the emulator, which has no PTX\n// Cuda compilation tools, release 13.0, V{}\n//\n\0",
            version()
        )
        .into_bytes();
        let (log, code) = match compile(&self.name, &self.source, arch) {
            Ok(compiled) => {
                self.image = compiled.image;
                (compiled.log, SUCCESS)
            }
            Err(CompileError::Source(log)) => (log, COMPILATION),
            Err(error) => (error.to_string(), INTERNAL),
        };
        self.log = (log + "\0").into_bytes();
        code
    }
}

/// `__CUDA_ARCH__` by the options, or the first option that is not known. What they say of arithmetic
/// holds anyway.
fn arch_of(options: &[String]) -> Result<u32, &str> {
    const KNOWN: [&str; 7] = [
        "--std=c++17",
        "--fmad=false",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--ptxas-options=-v",
        "--no-cache",
    ];
    let mut arch = 750;
    for option in options {
        if let Some(name) = option.strip_prefix("--gpu-architecture=") {
            let digits: String = name.chars().filter(char::is_ascii_digit).collect();
            let number: u32 = digits.parse().map_err(|_| option.as_str())?;
            arch = 10 * number;
        } else if !KNOWN.contains(&option.as_str()) {
            return Err(option);
        }
    }
    Ok(arch)
}

macro_rules! results {
    ($($size:ident $get:ident $field:ident: $what:literal;)*) => {$(
        #[doc = concat!("The size of ", $what, ", bytes.")]
        ///
        /// # Safety
        /// A live program; `size` is null or valid for a write.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $size(program: *mut c_void, size: *mut usize) -> Code {
            // SAFETY: the caller's promise.
            let Some(size) = (unsafe { size.as_mut() }) else { return INVALID_INPUT };
            // SAFETY: the caller's promise.
            unsafe {
                with(program, |program| {
                    *size = program.$field.len();
                    SUCCESS
                })
            }
        }

        #[doc = concat!("Copies ", $what, ".")]
        ///
        /// # Safety
        /// A live program; `to` is null or has room for as many bytes as the size function says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(program: *mut c_void, to: *mut c_char) -> Code {
            if to.is_null() {
                return INVALID_INPUT;
            }
            let copy = |program: &mut Program| {
                let from = &program.$field;
                // SAFETY: `to` has room for all of them.
                unsafe { to.cast::<u8>().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
                SUCCESS
            };
            // SAFETY: the caller's promise.
            unsafe { with(program, copy) }
        }
    )*};
}

results! {
    nvrtcGetProgramLogSize nvrtcGetProgramLog log: "the messages with their NUL";
    nvrtcGetCUBINSize nvrtcGetCUBIN image: "the image";
    nvrtcGetPTXSize nvrtcGetPTX ptx: "the PTX, which here holds a version alone";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_give_the_architecture() {
        let options = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(arch_of(&options(&[])), Ok(750));
        assert_eq!(arch_of(&options(&["--gpu-architecture=sm_90a", "--fmad=false"])), Ok(900));
        assert_eq!(arch_of(&options(&["--gpu-architecture=sm_100a"])), Ok(1000));
        assert_eq!(arch_of(&options(&["--fmad=true"])), Err("--fmad=true"));
    }
}
