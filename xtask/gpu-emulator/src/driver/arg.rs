//! Arguments of functions of the driver, as C passes them.

use std::ffi::{CStr, c_char};

use super::code::{Code, Result};

/// Where a function writes a value. Made only by callers of the C interface, who promise what cuda.h
/// asks for: null, or valid for the write.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn set(&self, value: T) -> Result<()> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, hence valid for the write by the C interface's contract.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Sets it where it is wanted.
    pub fn set_if(&self, value: T) {
        let _ = self.set(value);
    }

    /// Writes the `i`th of an array that the caller says is long enough.
    pub fn set_at(&self, i: usize, value: T) -> Result<()> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller of the C interface gave an array of more than `i` elements.
        unsafe { self.0.add(i).write(value) };
        Ok(())
    }
}

impl Out<u64> {
    /// The same place, for a value of four bytes.
    pub fn narrow(&self) -> Out<u32> {
        Out(self.0.cast())
    }

    /// The same place, for a value of one byte.
    pub fn byte(&self) -> Out<u8> {
        Out(self.0.cast())
    }
}

impl<T: Copy> Out<T> {
    pub fn get(&self) -> Result<T> {
        In(self.0.cast_const()).get()
    }
}

/// Where a function reads a value; as [`Out`].
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub fn get(&self) -> Result<T> {
        self.at(0)
    }

    /// The `i`th of an array that is long enough.
    pub fn at(&self, i: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller of the C interface gave an array of more than `i` elements. Structs may lie
        // unaligned in callers' unions.
        Ok(unsafe { self.0.add(i).read_unaligned() })
    }

    /// So many bytes there.
    pub fn bytes(&self, count: usize) -> Result<Vec<u8>> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), count) }.to_vec())
    }

    /// What lies at an address that callers gave inside a struct.
    pub fn of_address(address: usize) -> Self {
        Self(address as *const T)
    }

    /// The `i`th of an array of addresses.
    pub fn pointer_at<U>(&self, i: usize) -> Result<In<U>> {
        Ok(In(In(self.0.cast::<usize>()).at(i)? as *const U))
    }
}

/// The first bytes of an ELF file.
const ELF: [u8; 4] = *b"\x7fELF";

impl In<u8> {
    /// The code of a library: an ELF file as long as its headers say, or text without its NUL.
    pub fn image(&self) -> Result<Vec<u8>> {
        let mut start = Vec::new();
        while start.len() < ELF.len() && self.at(start.len())? != 0 {
            start.push(self.at(start.len())?);
        }
        if start == ELF {
            return self.bytes(self.elf_bytes()?);
        }
        // SAFETY: not null, and no ELF file, hence text that ends with a NUL.
        Ok(unsafe { CStr::from_ptr(self.0.cast()) }.to_bytes().to_vec())
    }

    /// How far the headers of an ELF file (64 bits, of this machine) reach.
    fn elf_bytes(&self) -> Result<usize> {
        let header = self.bytes(64)?;
        let number = |of: &[u8], at: usize, bytes: usize| {
            of[at..at + bytes].iter().rev().fold(0, |all, byte| all << 8 | usize::from(*byte))
        };
        let (programs, size, count) =
            (number(&header, 32, 8), number(&header, 54, 2), number(&header, 56, 2));
        let table = self.bytes(programs + size * count)?;
        let segment = |i: usize| programs + i * size;
        let ends = (0..count)
            .map(|i| number(&table, segment(i) + 8, 8) + number(&table, segment(i) + 32, 8));
        let sections = number(&header, 40, 8) + number(&header, 58, 2) * number(&header, 60, 2);
        Ok(ends.chain([sections]).max().unwrap_or(0))
    }
}

/// A string; as [`Out`].
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    pub fn get(&self) -> Result<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, hence NUL-terminated by the C interface's contract.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod testing {
    use super::*;

    impl<T> Out<T> {
        pub fn to(value: &mut T) -> Self {
            Self(value)
        }

        pub fn null() -> Self {
            Self(std::ptr::null_mut())
        }
    }

    impl<T> In<T> {
        pub fn from(value: &[T]) -> Self {
            Self(value.as_ptr())
        }

        pub fn null() -> Self {
            Self(std::ptr::null())
        }
    }

    impl Text {
        pub fn from(text: &'static CStr) -> Self {
            Self(text.as_ptr())
        }
    }
}
