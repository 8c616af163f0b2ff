// Images of the next message: chosen, dropped or pasted.

const MAX_BYTES = 8 * 1024 * 1024;
const TYPES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const THUMBNAIL = 56;

// The image files of a drop or a paste.
export function imagesIn(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

// Why a file is not taken, or "".
function refusal(file) {
  if (!TYPES.has(file.type)) return `${file.name} is no PNG, JPEG, WebP or GIF.`;
  if (file.size > MAX_BYTES) return `${file.name} is larger than 8 MiB; scale it down.`;
  return "";
}

function dataURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read.`)));
    reader.readAsDataURL(file);
  });
}

// Small picture on a canvas: the page's policy loads no images.
export async function thumbnail(file) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 2 * THUMBNAIL;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", file.name);
  canvas.title = file.name;
  const bitmap = await createImageBitmap(file);
  const scale = Math.max(canvas.width / bitmap.width, canvas.height / bitmap.height);
  const [width, height] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  return canvas;
}

function copyOf(picture) {
  const copy = picture.cloneNode();
  copy.getContext("2d").drawImage(picture, 0, 0);
  return copy;
}

export class Attachments {
  constructor(list, notice) {
    this.list = list;
    this.notice = notice;
    this.images = [];
  }

  // Add files; the first problem becomes the notice.
  async add(files) {
    for (const file of files) {
      try {
        const problem = refusal(file);
        if (problem) throw new Error(problem);
        const [picture, url] = await Promise.all([thumbnail(file), dataURL(file)]);
        this.images.push({ file, picture, url });
        this.notice("");
      } catch (error) {
        this.notice(error.name === "Error" ? error.message : `${file.name} is no picture that can be read.`);
      }
    }
    this.draw();
  }

  remove(image) {
    this.images = this.images.filter((other) => other !== image);
    this.draw();
  }

  // Take all images out.
  take() {
    const taken = this.images;
    this.images = [];
    this.draw();
    return taken;
  }

  // Attach images again that were taken out; those of the shown message stay there.
  putBack(images) {
    this.images.push(...images.map((image) => ({ ...image, picture: copyOf(image.picture) })));
    this.draw();
  }

  draw() {
    this.list.hidden = !this.images.length;
    this.list.replaceChildren(...this.images.map((image) => this.item(image)));
  }

  item(image) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "×";
    button.setAttribute("aria-label", `Remove ${image.file.name}`);
    button.addEventListener("click", () => this.remove(image));
    item.append(image.picture, button);
    return item;
  }
}

// Content of a message, with parts for the images.
export function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}
